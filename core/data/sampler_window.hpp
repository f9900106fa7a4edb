// A window of steps: the samples of W steps, taken together and dealt out anew, so that no step has
// all the long ones.  Which samples a step gets depends on seed, epoch, lengths and W alone, never
// on the mesh, on measured times or on memory.
// In the field: WLB-LLM (arXiv 2503.17924) lets outlier documents wait for a later step; LongAlign
// (arXiv 2401.18058) sorts by length.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "core/base/enum_names.hpp"
#include "core/data/sampler.hpp"

namespace ballast {

enum class WindowRule {
  balanced,  ///< steps of equal work
  sorted     ///< steps of neighbours in length, in random order
};

template <>
struct EnumNames<WindowRule> {
  static constexpr EnumTable<WindowRule, 2> table{
      {{WindowRule::balanced, "balanced"}, {WindowRule::sorted, "sorted"}}};
};

struct WindowOptions {
  std::int64_t steps = 1;  ///< W; 1: as the sampler takes them
  WindowRule rule = WindowRule::balanced;
  std::int64_t global_tokens = 0, global_samples = 0;  ///< of a step, as Sampler::next takes them
  /// Visible (query, key) pairs whose attention is as much arithmetic as the products of one token:
  /// of the model's shape (pairs_of_token); 0: attention is not counted.
  std::int64_t token_pairs = 0;
};

/// WindowOptions::token_pairs of a model: FLOPs of a token's products over those of a pair.
std::int64_t pairs_of_token(double token_flops, double pair_flops);

/// Takes steps out of windows.  A window holds up to W whole steps of one epoch, none beyond the
/// last step of a curriculum; a step that goes on in the next epoch is a window of its own.  So
/// every sample comes as often as without windows.
class SamplerWindow {
 public:
  /// Error: fewer than 1 step.
  explicit SamplerWindow(const WindowOptions& options);
  /// Samples of the next step, in the sampler's order; advances `position`.  With W = 1 those of
  /// Sampler::next.  Errors: as there; a position inside a window of another W.
  std::vector<std::int64_t> next(Sampler& sampler, SamplerPosition& position,
                                 const std::function<std::int64_t(std::int64_t)>& length);

 private:
  void fill(Sampler& sampler, const SamplerPosition& begin,
            const std::function<std::int64_t(std::int64_t)>& length);

  WindowOptions options_;
  SamplerPosition begin_{-1, 0, 0, 0}, end_;  ///< of the window below
  std::vector<std::vector<std::int64_t>> steps_;
};

}  // namespace ballast
