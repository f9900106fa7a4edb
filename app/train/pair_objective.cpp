#include "app/train/pair_objective.hpp"

#include <span>
#include <utility>

#include "app/train/local_batch.hpp"
#include "core/base/error.hpp"

namespace ballast {

std::vector<double> PairSums::numbers() const {
  return {pairs,
          loss,
          chosen_reward,
          rejected_reward,
          right,
          chosen_log_probability,
          rejected_log_probability};
}

PairSums PairSums::from(const double* n) { return {n[0], n[1], n[2], n[3], n[4], n[5], n[6]}; }

void PairSums::add(const PairLoss& pair, const PairLogProbabilities& policy) {
  pairs += 1;
  loss += pair.loss;
  chosen_reward += pair.chosen_reward;
  rejected_reward += pair.rejected_reward;
  right += pair.margin() > 0 ? 1 : 0;
  chosen_log_probability += policy.chosen;
  rejected_log_probability += policy.rejected;
}

PairSums PairSums::means() const {
  std::vector<double> all = numbers();
  for (double& sum : all) sum = pairs > 0 ? sum / pairs : 0;
  return from(all.data());
}

PairFigures pair_figures(const PairSums& m) {
  return {m.chosen_reward, m.rejected_reward,        m.chosen_reward - m.rejected_reward,
          m.right,         m.chosen_log_probability, m.rejected_log_probability};
}

PairObjective::PairObjective(const DpoConfig& config, const Mesh& mesh,
                             std::vector<PairLogProbabilities> reference)
    : beta_(config.beta),
      label_smoothing_(config.label_smoothing),
      mesh_(mesh),
      reference_(std::move(reference)) {}

bool PairObjective::speaks(const MicroBatch& micro_batch) const {
  return mesh_.ring(micro_batch.sp).rank() == 0 && mesh_.sequence(micro_batch.sp).rank() == 0;
}

std::vector<double> PairObjective::log_probabilities(const MicroBatch& micro_batch,
                                                     const std::vector<std::int32_t>& segment,
                                                     const Tensor& token_loss) const {
  std::vector<double> sums(micro_batch.segments.size(), 0.0);
  const Tensor host = token_loss.to(host_device());
  device_of(token_loss.space()).synchronize();
  dispatch_float(host.dtype(), [&](auto t) {
    const auto* losses = host.data<decltype(t)>();
    for (std::size_t i = 0; i < segment.size(); ++i)
      if (segment[i] >= 0)
        sums[static_cast<std::size_t>(segment[i])] -= static_cast<double>(losses[i]);
  });
  for (const Communicator* ranks : {&mesh_.sequence(micro_batch.sp), &mesh_.ring(micro_batch.sp)})
    if (ranks->size() > 1) ranks->all_reduce(std::span<double>(sums));
  return sums;
}

std::vector<PairLoss> PairObjective::losses(const MicroBatch& micro_batch,
                                            const std::vector<double>& policy,
                                            PairSums& sums) const {
  std::vector<PairLoss> list;
  const auto& segments = micro_batch.segments;
  for (std::size_t s = 0; s < segments.size(); s += 2) {
    require(s + 1 < segments.size() && segments[s].sample == segments[s + 1].sample &&
                segments[s].origin == 0 && segments[s + 1].origin > 0,
            "segments {} and {} of a micro-batch are no pair", s, s + 1);
    const PairLogProbabilities found{policy[s], policy[s + 1]};
    const PairLogProbabilities reference =
        reference_.empty() ? PairLogProbabilities{}
                           : reference_.at(static_cast<std::size_t>(segments[s].sample));
    list.push_back(sigmoid_preference_loss(found, reference, beta_, label_smoothing_));
    if (speaks(micro_batch)) sums.add(list.back(), found);
  }
  return list;
}

Tensor PairObjective::weigh(const MicroBatch& micro_batch, const std::vector<std::int32_t>& segment,
                            const Tensor& token_loss, PairSums& sums) const {
  // A log probability is minus the sum of its token losses.
  std::vector<double> weights;
  for (const PairLoss& pair :
       losses(micro_batch, log_probabilities(micro_batch, segment, token_loss), sums)) {
    weights.push_back(-pair.slope);
    weights.push_back(pair.slope);
  }
  return token_weights(weights, segment, token_loss.dtype(), device_of(token_loss.space()));
}

void PairObjective::judge(const MicroBatch& micro_batch, const std::vector<std::int32_t>& segment,
                          const Tensor& token_loss, PairSums& sums) const {
  losses(micro_batch, log_probabilities(micro_batch, segment, token_loss), sums);
}

}  // namespace ballast
