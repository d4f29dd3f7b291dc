# The server's image, by the same steps as `make serve`:
#   docker build -t omni-grpc:0.1.0-cpu .
#   docker build -t omni-grpc:0.1.0-cuda --build-arg DEVICE=cuda .
#   docker build -t omni-grpc:0.1.0-cpu --build-arg MODELS="smol-voice smol-read" .    (brings the models of these pipelines)
# Packages come from where pip's own configuration says: --secret id=pip.conf,src=...
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG DEVICE=cpu
ENV VENV=/opt/venv
WORKDIR /opt/omni-grpc
COPY scripts/environment scripts/environment
RUN scripts/environment venv
# The lists alone: what changes daily comes after what takes minutes.
COPY requirements/ requirements/
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    scripts/environment runtime "${DEVICE}"
COPY pyproject.toml README.md LICENSE ./
COPY omni_grpc/ omni_grpc/
COPY clients/python/ clients/python/
# Editable: both stay where they are. Compiled now, since the root file system is read-only when they run.
RUN scripts/environment packages && /opt/venv/bin/python -m compileall -q omni_grpc clients

FROM build AS models
ARG MODELS=""
# Unquoted: several names, or none, which leaves the folder empty.
# hadolint ignore=SC2086
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    mkdir /models && { [ -z "${MODELS}" ] || OMNI_GRPC_CACHE=/models /opt/venv/bin/omni-grpc prepare ${MODELS}; }

FROM ${PYTHON_IMAGE}
# A C++ compiler for what torch.compile and Triton make at run time; the libraries that vLLM on the CPU takes from the
# system; an init that reaps what a killed replica leaves behind.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libgomp1 libnuma1 tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 omni \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin omni
COPY --from=build /opt/omni-grpc /opt/omni-grpc
COPY --from=build /opt/venv /opt/venv
COPY --from=models --chown=10001:10001 /models /models
# Writable are /tmp (sockets, compile caches, everybody's home) and, unless it brings its models, /models.
# USER: libraries ask for the name of a user that a cluster may have invented.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    OMNI_GRPC_CACHE=/models \
    HF_HOME=/models/huggingface \
    HOME=/tmp \
    TMPDIR=/tmp \
    USER=omni \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/omni-grpc
USER 10001:10001
EXPOSE 50051 9464
ENTRYPOINT ["tini", "--", "omni-grpc"]
CMD ["serve", "--pipeline", "smol-voice", "--host", "0.0.0.0", "--insecure", "--metrics-port", "9464"]
