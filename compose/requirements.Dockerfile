# What a script needs beside torch, as a layer of its own on the image of a rank: ./run check LAB_REQUIREMENTS=requirements.txt.
ARG IMAGE
# hadolint ignore=DL3006
FROM ${IMAGE}
ARG REQUIREMENTS
COPY ${REQUIREMENTS} /tmp/requirements.txt
# torch stays the one of the image: another one would be gigabytes of CUDA.
RUN python -c "import torch; print(f'torch=={torch.__version__}')" > /tmp/torch.txt \
    && pip install --no-cache-dir --constraint /tmp/torch.txt --requirement /tmp/requirements.txt \
    && rm /tmp/requirements.txt /tmp/torch.txt
