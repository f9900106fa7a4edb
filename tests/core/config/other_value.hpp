// A value of a key that is not its default, for tests that go through all keys.
#pragma once
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/config/deck_schema.hpp"

namespace ballast {

/// A value of the key's type that it allows and that is not its default.
inline DeckValue other_value(const KeySpec& spec) {
  const auto word = [&](const std::string& unless) {
    for (const std::string& text : spec.allowed)
      if (text != unless) return text;
    return std::string("other");
  };
  const auto number = [&](double unless) {
    for (const double value : {spec.minimum.value_or(0), spec.maximum.value_or(7),
                               spec.minimum.value_or(0) + 1, spec.maximum.value_or(3) / 2})
      if (value != unless && value_problem(spec, spec.default_value.index() == 1
                                                     ? DeckValue(static_cast<std::int64_t>(value))
                                                     : DeckValue(value))
                                 .empty())
        return value;
    ADD_FAILURE() << spec.path();
    return 0.0;
  };
  switch (spec.default_value.index()) {
    case 0:
      return !std::get<bool>(spec.default_value);
    case 1:
      return static_cast<std::int64_t>(
          number(static_cast<double>(std::get<std::int64_t>(spec.default_value))));
    case 2:
      return number(std::get<double>(spec.default_value));
    case 3:
      return word(std::get<std::string>(spec.default_value));
    case 4:
      return std::vector<std::int64_t>{static_cast<std::int64_t>(spec.minimum.value_or(0)) + 3};
    case 5:
      return std::vector<double>{spec.minimum.value_or(0) + 0.25};
    default:
      return std::vector<std::string>{spec.allowed.empty() ? "other" : spec.allowed.back()};
  }
}

}  // namespace ballast
