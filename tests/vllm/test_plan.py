"""Real servers without the plugin: the KV arithmetic of `autoscaler plan`, and that the daemon goes on without it."""

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from autoscaler.catalog import model
from autoscaler.core.kv import GIB, kv_element_bytes, kv_layout, weight_bytes
from tests.vllm.daemon import left_alone
from tests.vllm.server import LIMITS, Place, Start, VllmServer, running_server

pytestmark = [pytest.mark.timeout(1500), pytest.mark.asyncio(loop_scope="session")]


async def cache_config(server: VllmServer) -> dict[str, str]:
    """Return the labels of `vllm:cache_config_info`."""
    page = (await server.client.get("/metrics")).raise_for_status().text
    families = [one for one in text_string_to_metric_families(page) if one.name.startswith("vllm:cache_config_info")]
    return dict(families[0].samples[0].labels)


async def test_the_cache_follows_from_the_models_files_and_there_is_no_route(place: Place, tmp_path: Path) -> None:
    async with running_server(place, Start(blocks=None, plugin=False)) as server:
        labels = await cache_config(server)
        assert (await server.client.get(LIMITS)).status_code == httpx.codes.NOT_FOUND
        why = await left_alone(server, tmp_path)
        assert "404" in why
    shape = model(str(place.model))
    assert weight_bytes(shape) == pytest.approx(2 * shape.parameters, rel=0.01)  # the files' size, in bfloat16
    layout = kv_layout(shape, 1, kv_element_bytes(shape, labels["cache_dtype"]), int(labels["block_size"]))
    blocks = layout.blocks(GIB)  # VLLM_CPU_KVCACHE_SPACE=1
    assert blocks == int(labels["num_gpu_blocks"])
    assert layout.size_tokens(blocks, 2048, 512) == int(labels["kv_cache_size_tokens"])
