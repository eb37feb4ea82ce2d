// SPDX-License-Identifier: Apache-2.0
//
// The Python extension weft._core: pointers, integers and strings in and out, no logic, nothing of torch.
#include <nanobind/nanobind.h>

#include "bind/bind.h"
#include "extra/bind.h"

NB_MODULE(_core, module) {
  // torch keeps process groups, and so what belongs to them, until after the interpreter's end.
  nanobind::set_leak_warnings(false);
  weft::bind_base(module);
  weft::bind_collective(module);
  weft::bind_jit(module);
  weft::bind_leases(module);
  weft::bind_moe(module);
  weft::bind_low_latency(module);
  weft::bind_elastic(module);
  weft::bind_plan(module);
  weft::bind_runtime(module);
  weft::bind_signature(module);
  weft::bind_tally(module);
  weft::bind_tensor_maker(module);
  weft::bind_tensors(module);
  weft::bind_transfer(module);
  weft::bind_extra(module);
}
