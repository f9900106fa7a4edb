// The table of combinations: what a deck can choose between, and which choices do not run together.
// `check` and `train` refuse by it, `ballast --help combinations` prints it, the tests iterate over
// it: every pair that it does not refuse is trained on a tiny model.
#pragma once
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/base/problem.hpp"

namespace ballast {

struct Config;

/// One choice: a value of one dimension.
struct Choice {
  std::string dimension;  ///< "method", "pattern", "schedule" ...
  std::string value;      ///< "hbp", "moba", "1f1b" ...
  Key key;                ///< that decides it
  /// Settings "block.key=value" that make a deck choose it; empty: the deck's default.
  std::vector<std::string> settings;
  std::function<bool(const Config&)> chosen;
  std::string name() const { return dimension + " " + value; }
};

/// All choices, dimension by dimension; a Config chooses one of each.
std::span<const Choice> choices();

/// Choices of different dimensions that do not run together, or one that does not run at all.
struct Refusal {
  std::vector<std::string> choices;  ///< their names, the one to change first
  std::string because, remedy;
  bool planned = false;  ///< plans are made of it (`pack`, `plan`); only executors refuse it
  /// That decide the choices, in their order.
  std::vector<Key> keys() const;
};
std::span<const Refusal> refusals();

/// The refusals that a Config meets, one problem each.  `executes`: ranks are to run it.
std::vector<Problem> refused_combinations(const Config& config, bool executes);

/// The table as text: every dimension with its choices, then every refusal with its reason.
std::string combinations_text();
/// The same as JSON: {"dimensions": {name: [{"value", "key", "settings"}]}, "refused": [{"choices",
/// "keys", "because", "remedy", "planned"}]}.
std::string combinations_json();

}  // namespace ballast
