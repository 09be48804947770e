"""Rivals: what other autoscalers would order, re-implemented from their documents and held to their own assertions.

`RIVALS` names each with its vendor's numbers. A rival is `RIVALS[name].build()`, asked through `desired(now, view)`;
`dataclasses.replace` changes its numbers, and `base.spans` says which of them a search may change, within what.
"""

from bench.rivals import aibrix, dynamo, epp, hpa, keda, kpa, phpa, ray_serve, slo_aware, static, wva
from bench.rivals.base import Settings

RIVALS: dict[str, Settings] = {
    "static": static.StaticSettings(),
    "hpa-queue": hpa.HpaQueueSettings(),
    "hpa-gpu": hpa.HpaGpuSettings(),
    "keda-gpu-70": keda.GPU_70,
    "keda-queue-50-gpu-80": keda.QUEUE_50_GPU_80,
    "keda-queue-8-gpu-75": keda.QUEUE_8_GPU_75,
    "keda-in-flight": keda.IN_FLIGHT,
    "keda-production-stack": keda.PRODUCTION_STACK,
    "kpa": kpa.KpaSettings(),
    "aibrix-apa": aibrix.ApaSettings(),
    "aibrix-kpa": aibrix.AibrixKpaSettings(),
    "ray-serve": ray_serve.RayServeSettings(),
    "llmd-wva": wva.WvaSettings(),
    "llmd-slo-aware": slo_aware.SloAwareSettings(),
    "llmd-epp-saturation": epp.EppSettings(),
    "llmd-epp-in-flight": epp.EppSettings(saturation=None),
    "llmd-epp-token-aware": epp.TokenAwareSettings(),
    "dynamo-throughput": dynamo.DynamoSettings(),
    "dynamo-load": dynamo.DynamoSettings(throughput=False, load=True),
    "dynamo-both": dynamo.DynamoSettings(load=True),
    "token-work": dynamo.TokenWorkSettings(),
    "phpa-linear": phpa.PhpaSettings(),
    "phpa-holt": phpa.PhpaSettings(model="holt"),
    "phpa-holt-winters": phpa.PhpaSettings(model="holt-winters"),
}
