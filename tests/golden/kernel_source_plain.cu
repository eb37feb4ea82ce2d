#include "kernels/moe/some_kernel.cuh"
struct Shape {
};
extern "C" __global__ void __launch_bounds__(512, 1)
weft_some_kernel(const __grid_constant__ weft::SomeArgs args,
            const __grid_constant__ weft::NoMesh mesh) {
  weft::some_kernel<weft::NoMesh, Shape>(args, mesh, Shape{});
}
