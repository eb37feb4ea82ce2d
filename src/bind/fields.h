// SPDX-License-Identifier: Apache-2.0
//
// A struct of the core from keywords of Python, each named once, beside its member:
//   const Fields<Facts> fields = Fields<Facts>().required("tokens", &Facts::tokens).optional(...);
//   const Facts facts = fields.filled(kwargs);
// An optional keyword that is left out keeps the struct's default. Errors: TypeError naming a keyword that is missing,
// unknown, or of another type.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace weft {

template <class Struct>
class Fields {
 public:
  template <class Value>
  Fields required(const char* name, Value Struct::* member) && {
    return std::move(*this).with(name, member, true);
  }
  template <class Value>
  Fields optional(const char* name, Value Struct::* member) && {
    return std::move(*this).with(name, member, false);
  }

  Struct filled(const nanobind::kwargs& given) const {
    Struct result{};
    size_t num_used = 0;
    for (const Field& field : fields_) {
      if (!given.contains(field.name)) {
        if (field.is_required) refuse(field.name, "missing");
        continue;
      }
      ++num_used;
      if (!field.set(result, given[field.name])) refuse(field.name, "of another type");
    }
    if (num_used != given.size()) refuse_unknown(given);
    return result;
  }

 private:
  struct Field {
    const char* name;
    bool is_required;
    std::function<bool(Struct&, nanobind::handle)> set;
  };

  template <class Value>
  Fields with(const char* name, Value Struct::* member, bool is_required) && {
    fields_.push_back({name, is_required, [member](Struct& into, nanobind::handle value) {
                         return nanobind::try_cast(value, into.*member, false);
                       }});
    return std::move(*this);
  }

  [[noreturn]] static void refuse(std::string_view name, std::string_view why) {
    throw nanobind::type_error((std::string(name) + ": " + std::string(why)).c_str());
  }

  [[noreturn]] void refuse_unknown(const nanobind::kwargs& given) const {
    for (const auto& [key, value] : given) {
      const auto name = nanobind::cast<std::string>(key);
      bool is_known = false;
      for (const Field& field : fields_) is_known = is_known || name == field.name;
      if (!is_known) refuse(name, "unknown");
    }
    refuse("keywords", "given twice");
  }

  std::vector<Field> fields_;
};

}  // namespace weft
