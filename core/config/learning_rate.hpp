// The learning rate of each step: warm-up, then one of the field's schedules.
#pragma once
#include <cstdint>

#include "core/base/enum_names.hpp"

namespace ballast {

enum class LearningRateSchedule { constant, linear, cosine, wsd };
template <>
struct EnumNames<LearningRateSchedule> {
  static constexpr EnumTable<LearningRateSchedule, 4> table{
      {{LearningRateSchedule::constant, "constant"},
       {LearningRateSchedule::linear, "linear"},
       {LearningRateSchedule::cosine, "cosine"},
       {LearningRateSchedule::wsd, "wsd"}}};
};

struct LearningRate {
  LearningRateSchedule schedule = LearningRateSchedule::cosine;
  double peak = 0, minimum = 0;
  std::int64_t warmup_steps = 0;
  std::int64_t decay_steps = 0;      ///< step at which the decay ends
  std::int64_t wsd_decay_steps = 0;  ///< wsd: steps that the decay takes, the last ones
  /// Of `step`, counted from 1.  Linear warm-up to `peak` at warmup_steps; then constant, or down
  /// to `minimum` at decay_steps along a line or half a cosine, or (warm-up, stable, decay)
  /// constant and down a line in the last wsd_decay_steps (MiniCPM, arXiv 2404.06395).
  double at(std::int64_t step) const;
};

}  // namespace ballast
