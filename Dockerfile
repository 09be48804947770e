# 3.12, not newer: from 3.13 on Python refuses API servers whose certificates lack key identifiers.
FROM python:3.12-slim AS python

FROM python AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY policies policies
COPY autoscaler autoscaler
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python AS install
RUN pip install --no-cache-dir 'uv>=0.5'
COPY requirements-dev.lock /
COPY --from=wheel /wheel /wheel
# The versions that the tests ran with: the lock file only constrains, so that no development tool comes along.
RUN python -m venv --without-pip /opt/autoscaler \
 && uv pip install --no-cache --python /opt/autoscaler/bin/python --compile-bytecode \
      --constraints /requirements-dev.lock "$(echo /wheel/*.whl)[nvml]"

FROM python
LABEL org.opencontainers.image.title="vllm-autoscaler" \
      org.opencontainers.image.description="Keeps vLLM Deployments on Kubernetes at the right size, and says why." \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=install /opt/autoscaler /opt/autoscaler
ENV PATH=/opt/autoscaler/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /
EXPOSE 9090
ENTRYPOINT ["autoscaler"]
