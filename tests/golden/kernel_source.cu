#include "kernels/moe/some_kernel.cuh"
#include "transports/mapped/channel.cuh"
struct Shape {
  static constexpr int64_t row_bytes = 14336;
  static constexpr int64_t top_k = 8;
  static constexpr int64_t least = -1;
};
extern "C" __global__ void __launch_bounds__(512, 2)
weft_some_kernel(const __grid_constant__ weft::SomeArgs args,
            const __grid_constant__ weft::MappedMesh mesh) {
  weft::some_kernel<weft::MappedMesh, Shape>(args, mesh, Shape{});
}
