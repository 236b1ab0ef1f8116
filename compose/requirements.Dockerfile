# A script's own requirements, as a layer on the image of a rank: ./run check LAB_REQUIREMENTS=requirements.txt.
ARG IMAGE
# hadolint ignore=DL3006
FROM ${IMAGE}
ARG REQUIREMENTS
COPY ${REQUIREMENTS} /tmp/requirements.txt
# Keep the image's torch: another one would download gigabytes of CUDA.
RUN python -c "import torch; print(f'torch=={torch.__version__}')" > /tmp/torch.txt \
    && pip install --no-cache-dir --constraint /tmp/torch.txt --requirement /tmp/requirements.txt \
    && rm /tmp/requirements.txt /tmp/torch.txt
