// The kernels of the replay verifier and of the driver layer's tests. kernels.ptx is made from this by
//   nvcc -ptx -arch=compute_75 kernels.cu
// with its target lowered by hand to sm_60 and version 6.4, which it does not exceed, so that older drivers take it.
typedef unsigned int u32;
typedef unsigned long long u64;
__device__ __forceinline__ u32 pattern(u32 seed, u64 index) {
    u32 mixed = ((u32)index ^ (u32)(index >> 32)) * 0x9e3779b1u ^ seed;
    return (mixed ^ (mixed >> 15)) * 0x85ebca77u;
}
extern "C" __global__ void fill(u32 *to, u64 words, u32 seed) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < words; i += (u64)gridDim.x * blockDim.x) to[i] = pattern(seed, i);
}
extern "C" __global__ void check(const u32 *from, u64 words, u32 seed, u64 *mismatches) {
    u64 wrong = 0;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < words; i += (u64)gridDim.x * blockDim.x) wrong += from[i] != pattern(seed, i);
    if (wrong) atomicAdd(mismatches, wrong);
}
extern "C" __global__ void copy(unsigned char *to, const unsigned char *from, u64 bytes) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < bytes; i += (u64)gridDim.x * blockDim.x) to[i] = from[i];
}
extern "C" __global__ void spin(u64 nanoseconds) {
    u64 start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
