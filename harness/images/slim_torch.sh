#!/bin/sh
# slim_torch.sh FOLDER: let a CUDA build of torch in FOLDER (a site-packages) work on the CPU without CUDA's own wheels,
# 4 GB less. torch's libraries name CUDA libraries that the loader insists on, though nothing calls them without a GPU.
# So one stub library defines every CUDA function that they import, and an empty library under each expected name pulls
# it in. A stub answers 100, cudaErrorNoDevice; but error texts must be strings, and transformers asks
# cudaStreamIsCapturing even on the CPU, which must succeed and say no. For tests only. Needs gcc and binutils.
set -eu
cd "$1/torch/lib"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

needed() { readelf --wide --dynamic ./*.so* 2>/dev/null | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u; }
imported() { nm --dynamic --undefined-only ./*.so* 2>/dev/null | sed -n 's/^ *[Uw] \([^@]*\).*/\1/p' | sort -u; }
others() { printf '%s\n' cudaMallocManaged cudaMemPrefetchAsync; } # bitsandbytes'

needed | grep -E '^lib(cu|nccl|nv)' >"$work/libraries"
{ imported && others; } | grep -E '^(__cuda|cuda|cu[A-Z]|cublas|cudnn|cufft|cufile|cuFile|cupti|curand|cusolver|cusparse|nccl|nvml|nvrtc|nvshmem|nvtx)' |
while read -r name; do
    case $name in
    cudaStreamIsCapturing) echo "int $name(void *stream, int *status) { *status = 0; return 0; }" ;;
    *String | *ErrorName) echo "const char *$name(void) { return \"built without CUDA\"; }" ;;
    *) echo "long $name(void) { return 100; }" ;;
    esac
done >"$work/stub.c"
gcc -shared -fPIC -fno-builtin -w -Wl,-soname,libcudastub.so -o libcudastub.so "$work/stub.c"
while read -r name; do
    test -e "$name" ||
        gcc -shared -o "$name" -Wl,-soname,"$name" -Wl,--no-as-needed -L. -lcudastub -Wl,-rpath,'$ORIGIN'
done <"$work/libraries"
