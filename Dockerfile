# Paceline and its examples in a container.
#
#     docker build -t paceline .                                                            # CPU
#     docker build -t paceline --build-arg BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime --build-arg TORCH= .
#
# BASE: an image with Python 3.11 or later. TORCH: the requirement that brings torch; empty where BASE has one. The CUDA
# image needs NVIDIA's container toolkit on the host: docker run --gpus all paceline paceline doctor
ARG BASE=python:3.11-slim
FROM ${BASE}

ARG TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
RUN if [ -n "${TORCH}" ]; then pip install --no-cache-dir ${TORCH}; fi

WORKDIR /opt/paceline
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY examples examples
RUN pip install --no-cache-dir ".[demo,view]"

# Workers need no rights of the administrator; what they write goes to /work, for a volume.
RUN useradd --create-home worker && mkdir /work && chown worker /work
USER worker
WORKDIR /work
CMD ["paceline", "demo"]
