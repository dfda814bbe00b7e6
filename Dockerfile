# docker build -t roll-batching .        on NVIDIA's PyTorch image, whose own pip constraints keep its torch
# docker build -t roll-batching:cpu --build-arg BASE=python:3.11-slim --build-arg CONSTRAINT=constraints.txt .
ARG BASE=nvcr.io/nvidia/pytorch:25.09-py3
FROM ${BASE}
ARG CONSTRAINT=/dev/null
WORKDIR /opt/roll-batching
COPY . .
RUN pip install --no-cache-dir '.[hf,megatron,ray]' --constraint "${CONSTRAINT}"
WORKDIR /workspace
CMD ["roll-batching", "doctor"]
