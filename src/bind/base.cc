// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "base/config.h"
#include "base/deep_ep_variables.h"
#include "base/log.h"
#include "base/private_path.h"
#include "base/process_name.h"
#include "bind/bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace weft {

void check(const Status& status) {
  if (status.ok()) return;
  nb::gil_scoped_acquire gil;
  nb::object error =
      nb::module_::import_("weft.errors").attr("from_core")(to_string(status.code()), status.message());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

void bind_base(nb::module_& module) {
  module.def("config_table", [] {
    nb::list rows;
    for (const OptionRow& row : config_table())
      rows.append(nb::make_tuple(row.variable, row.type, row.initial, row.value, row.source, row.help));
    return rows;
  });
  module.def("config_check", [] { check(config_status()); });
  module.def("use_job_secret", &use_job_secret);
  module.def("awaits_job_secret", &awaits_job_secret);
  module.def("deep_ep_variables", [] {
    nb::list made;
    for (const ForeignVariable& variable : deep_ep_variables())
      made.append(nb::make_tuple(variable.text, variable.is_used));
    return made;
  });
  module.def("take_uccl_variables", [] {
    nb::list made;
    for (const ForeignVariable& variable : take_uccl_variables())
      made.append(nb::make_tuple(variable.text, variable.is_used));
    return made;
  });
  module.def("read_private", [](const std::string& path, uint64_t bytes_max) {
    const std::string bytes = value_or_throw(read_private(path, bytes_max));
    return nb::bytes(bytes.data(), bytes.size());
  });
  module.def("this_process_name", [] {
    const ProcessName name = this_process_name();
    return nb::bytes(&name, sizeof name);
  });
  // Of bytes that another process gave; what is no name is a process that is not known.
  nb::class_<NamedProcess>(module, "NamedProcess")
      .def(
          "__init__",
          [](NamedProcess* self, nb::bytes given) {
            ProcessName name;
            if (given.size() == sizeof name) std::memcpy(&name, given.c_str(), sizeof name);
            new (self) NamedProcess(name);
          },
          "name"_a)
      .def_prop_ro("has_ended", &NamedProcess::has_ended)
      .def_prop_ro("was_killed", &NamedProcess::was_killed)
      .def_prop_ro("who", &NamedProcess::who)
      .def_prop_ro("fate", &NamedProcess::fate);
  nb::class_<OwnerProcess>(module, "OwnerProcess", "The process that made it.")
      .def(nb::init<>())
      .def_prop_ro("is_this", &OwnerProcess::is_this)
      .def(
          "check", [](const OwnerProcess& self, const std::string& what) { check(self.check(what.c_str())); },
          "what"_a, "Raises in a child that was forked from it: `what` is refused.");
  module.def("config_reload", [] {
    config_reload();
    check(config_status());
  });
#define WEFT_OPTION(name, type, initial, help, ...) config_class.def_ro(#name, &Config::name, help);
  nb::class_<Config> config_class(module, "Config");
  WEFT_OPTIONS(WEFT_OPTION)
  WEFT_EXTRA_OPTIONS(WEFT_OPTION)
#undef WEFT_OPTION
  module.def("config", &config, nb::rv_policy::reference);
}

}  // namespace weft
