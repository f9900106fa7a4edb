// Why a choice is not in the best plan that `ballast tune` found.
#pragma once
#include <string>
#include <vector>

#include "core/search/tune.hpp"

namespace ballast {

/// One choice that the best plan does not make, such as method hbp.
struct Loss {
  std::string choice;  ///< "method hbp", "pp 4" ...
  std::string plan;    ///< the best with it that was simulated; "" without one
  double slower = 0;   ///< its first step over the best plan's; 0 without one
  std::string why;     ///< its largest term beyond the best plan's, or memory, or a rule's words
};

/// In the order of facets(): the choices of each kind from the fastest to those that cannot run.
/// Nothing where no plan fits.
std::vector<Loss> losses(const TuneResult& result, const TuneLimits& limits);

/// Why no plan fits: the smallest that was found, or what refused all.
std::string nothing_fits(const TuneResult& result, const TuneLimits& limits);

/// What of a first step's time exceeds that of another the most: "exchange +0.120 s"; that nothing
/// does.
std::string largest_difference(const Trial& slower, const Trial& faster);

}  // namespace ballast
