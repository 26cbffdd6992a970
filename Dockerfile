# syntax=docker/dockerfile:1
#
# CPU:   docker build -t ngramspec .
# CUDA:  docker build -t ngramspec:cuda --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 \
#          --build-arg TORCH_INDEX=https://pypi.org/simple --build-arg PACKAGES="gcc python3-dev" .   (Triton compiles its launchers)
#        docker run --gpus all … ngramspec:cuda --device cuda
#
# docker run --rm -p 127.0.0.1:8000:8000 -v ~/models:/models:ro -v ngramspec-cache:/cache ngramspec --model /models/my-model
#
# Pin the base by digest for builds that can be repeated: --build-arg BASE=python:3.12-slim-bookworm@sha256:… (`docker buildx imagetools
# inspect python:3.12-slim-bookworm` prints it). docs/deployment.md has Compose, Kubernetes and proxies.
#
# Inside, the server listens on all addresses: publish the port on 127.0.0.1 only, or set keys (NGRAMSPEC_API_KEYS, or --api-key-file
# with a secret). Requests come through Docker's bridge and so count as remote: what only loopback may see needs an administrator's key.
# `docker stop -t 40` leaves running requests their 30 seconds.

ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS base
ARG PACKAGES=
# What a base may lack: OpenMP, which numba's threads wait in, and Python.
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      libgomp1 ${PACKAGES} $(command -v python3 > /dev/null || echo python3 python3-venv) \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/ngramspec/bin:$PATH

FROM base AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 -m venv /opt/ngramspec
# torch first, and by itself: by far the largest layer, and the one that changes least.
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch>=2.11,<3"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY datastore datastore
COPY ngramspec ngramspec
RUN pip install --no-cache-dir '.[all]'
# Machine code for all processors of the builder's level (x86-64-v3 or v4), if it has one.
RUN ngramspec warm-up --portable || ! grep -q avx2 /proc/cpuinfo

FROM base
COPY --from=build /opt/ngramspec /opt/ngramspec
RUN useradd --uid 10001 --create-home ngramspec && install -d -o ngramspec -g ngramspec /cache
# By its number, since Kubernetes' runAsNonRoot does not look names up.
USER 10001
WORKDIR /home/ngramspec
# Converted models, downloads and compiled functions: what can be made again, and takes minutes.
ENV NGRAMSPEC_CACHE=/cache/ngramspec \
    HF_HOME=/cache/huggingface \
    NUMBA_CACHE_DIR=/cache/numba \
    PYTHONUNBUFFERED=1 \
    NGRAMSPEC_HOST=0.0.0.0 \
    NGRAMSPEC_PORT=8000
# Where there is no such level: for processors like the one that builds the image. Others compile at their first start.
RUN ngramspec warm-up
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=300s --retries=3 \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['NGRAMSPEC_PORT'] + '/health', timeout=4)"]
ENTRYPOINT ["ngramspec", "serve"]
CMD ["--help"]
