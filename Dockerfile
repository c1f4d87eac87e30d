# gpuprobe with the build of torch that its simulated GPUs run: for macOS, Windows, and machines
# where nothing may be installed. Your folder is /src:
#
#   docker build --tag gpuprobe https://github.com/gpuprobe/gpuprobe.git
#   docker run --rm -it -v "$PWD:/src" gpuprobe estimate --gpu t4 train.py
#
# What your script imports has to be in the image, too: FROM gpuprobe, RUN pip install ...
FROM python:3.12-slim

# torch.compile and Triton compile at run time, and so need a compiler; gpuprobe alone does not.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

COPY packaging/install_torch.py /build/packaging/
COPY pyproject.toml /build/
RUN python /build/packaging/install_torch.py

COPY . /build
RUN pip install "/build[models]" && rm -rf /build

WORKDIR /src
ENTRYPOINT ["gpuprobe"]
CMD ["--help"]
