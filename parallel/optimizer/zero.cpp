#include "parallel/optimizer/zero.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/ops/elementwise.hpp"

namespace ballast {
namespace {

/// AdamWState::decay of elements [begin, end) of the trainable part.
Tensor decay_ranges(const Parameters& parameters, std::int64_t begin, std::int64_t end,
                    Device& device) {
  std::vector<std::int64_t> bounds;
  for (const Parameter& p : parameters.trainable_table()) {
    if (!p.weight_decay) continue;
    const std::int64_t offset = parameters.trainable_offset(p.name),
                       first = std::max(offset, begin) - begin,
                       last = std::min(offset + p.numel(), end) - begin;
    if (first >= last) continue;
    if (!bounds.empty() && bounds.back() == first)
      bounds.back() = last;
    else
      bounds.insert(bounds.end(), {first, last});
  }
  const auto n = static_cast<std::int64_t>(bounds.size());
  Tensor ranges = Tensor::empty({n}, DType::i64, device, MemoryCategory::optimizer);
  if (n > 0) ranges.copy_from(Tensor::wrap(bounds.data(), {n}, DType::i64));
  return ranges;
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(Parameters& parameters, const Communicator& replica,
                                   int zero_stage, AdamWOptions options, Recorder* recorder,
                                   std::optional<MuonOptions> muon)
    : parameters_(parameters),
      replica_(replica),
      zero_stage_(zero_stage),
      options_(options),
      recorder_(recorder) {
  require(zero_stage >= 0 && zero_stage <= 2, "optimizer.zero = {}: must be 0, 1 or 2", zero_stage);
  const std::int64_t padded = parameters.trainable_values().numel(), ranks = replica.size();
  require(padded % ranks == 0,
          "{} parameters do not divide over {} ranks: pad the flat buffer to a multiple of {}",
          padded, ranks, ranks);
  begin_ = zero_stage == 0 ? 0 : padded / ranks * replica.rank();
  end_ = zero_stage == 0 ? padded : begin_ + padded / ranks;
  if (muon) {
    require(zero_stage < 2, "optimizer.kind = \"muon\" is not run with optimizer.zero = 2: set 1");
    muon_.emplace(parameters, replica, zero_stage == 1, begin_, end_, *muon);
  }
  const std::int64_t n = end_ - begin_, adamw = n - muon_part();
  const DType sums = parameters.gradients().dtype();
  Device& device = device_of(parameters.values().space());
  const auto state = [&](std::int64_t elements) {
    return Tensor::zeros({elements}, sums, device, MemoryCategory::optimizer);
  };
  state_.master =
      parameters.dtype() == sums ? parameters.trainable_values().rows(begin_, end_) : state(n);
  state_.moment1 = state(n);
  state_.moment2 = state(adamw);
  state_.decay = decay_ranges(parameters, end_ - adamw, end_, device);
  shard_gradient_ = zero_stage == 2 ? Tensor::zeros({n}, sums, device, MemoryCategory::gradients)
                                    : parameters.gradients().rows(begin_, end_);
}

void ShardedOptimizer::begin_step() {
  parameters_.clear_gradients();
  if (zero_stage_ == 2) shard_gradient_.zero();
}

void ShardedOptimizer::after_micro_batch() {
  if (zero_stage_ < 2) return;
  Scope scope(recorder_, EventKind::gradient_reduce);
  parameters_.settle_gradients();
  Tensor& gradients = parameters_.gradients();
  Tensor reduced = gradients.rows(begin_, end_);  // in place: this rank's block
  replica_.reduce_scatter(gradients, reduced);
  add(shard_gradient_, reduced, shard_gradient_);
  parameters_.clear_gradients();
  scope.bytes = static_cast<std::int64_t>(gradients.bytes() - reduced.bytes());
}

void ShardedOptimizer::reduce_gradients() {
  Scope scope(recorder_, EventKind::gradient_reduce);
  parameters_.settle_gradients();
  Tensor& gradients = parameters_.gradients();
  const std::int64_t ranks = replica_.size(), block = gradients.numel() / ranks;
  const auto other_blocks =
      static_cast<std::int64_t>(size_of(gradients.dtype())) * block * (ranks - 1);
  if (zero_stage_ == 0) {
    replica_.all_reduce(gradients);
    scope.bytes = 2 * other_blocks;
  } else if (zero_stage_ == 1) {
    replica_.reduce_scatter(gradients, shard_gradient_);
    scope.bytes = other_blocks;
  }
}

double ShardedOptimizer::squared_norm() {
  Scope scope(recorder_, EventKind::gradient_reduce);
  // The tied copy is the last parameter of its stage.
  std::int64_t counted = parameters_.trainable_numel();
  for (const Parameter& p : parameters_.trainable_table())
    if (p.tied_copy) counted = parameters_.trainable_offset(p.name);
  const auto squares = [&](std::int64_t begin, std::int64_t end) {
    end = std::min(end, counted);
    return begin < end ? sum_of_squares(shard_gradient_.rows(begin - begin_, end - begin_)) : 0.0;
  };
  if (zero_stage_ > 0) return replica_.all_reduce(squares(begin_, end_));
  // Block by block, in the order in which the sharded stages add them up: the norm has the same
  // bits.
  const std::int64_t ranks = replica_.size(), block = parameters_.gradients().numel() / ranks;
  double sum = 0;
  for (std::int64_t r = 0; r < ranks; ++r) sum += squares(block * r, block * (r + 1));
  return sum;
}

void ShardedOptimizer::apply(double gradient_scale, double learning_rate, std::int64_t step) {
  const std::int64_t first = muon_part(), n = end_ - begin_;
  const Tensor values = parameters_.trainable_values().rows(begin_, end_);
  if (muon_)
    muon_->apply(state_.moment1.rows(0, first), shard_gradient_.rows(0, first),
                 state_.master.rows(0, first), values.rows(0, first), gradient_scale, learning_rate,
                 recorder_);
  {
    Scope scope(recorder_, EventKind::optimizer);
    AdamWState state{state_.master.rows(first, n), state_.moment1.rows(first, n), state_.moment2,
                     state_.decay};
    Tensor rest = values.rows(first, n);
    adamw_step(state, shard_gradient_.rows(first, n), gradient_scale, learning_rate, step, options_,
               rest);
  }
  gather_values();
}

std::int64_t ShardedOptimizer::muon_part() const {
  return std::clamp<std::int64_t>(muon_elements() - begin_, 0, end_ - begin_);
}

void ShardedOptimizer::gather_values() {
  parameters_.values_changed();
  if (zero_stage_ == 0) return;
  Scope scope(recorder_, EventKind::parameter_gather);
  Tensor values = parameters_.trainable_values();
  const Tensor own = values.rows(begin_, end_);
  replica_.all_gather(own, values);
  scope.bytes = static_cast<std::int64_t>(own.bytes()) * (replica_.size() - 1);
}

void ShardedOptimizer::reset_master_from_values() {
  const Tensor values = parameters_.trainable_values().rows(begin_, end_);
  if (state_.master.raw() != values.raw()) copy_rows(values, state_.master);
}

void ShardedOptimizer::values_from_master() {
  Tensor values = parameters_.trainable_values().rows(begin_, end_);
  if (state_.master.raw() != values.raw()) copy_rows(state_.master, values);
  gather_values();
}

Tensor ShardedOptimizer::full_gradient(const std::string& name) {
  if (zero_stage_ == 0) return parameters_.gradient(name).clone();
  Tensor all = Tensor::empty({parameters_.gradients().numel()}, shard_gradient_.dtype(),
                             device_of(shard_gradient_.space()), MemoryCategory::workspace);
  replica_.all_gather(shard_gradient_, all);
  const Parameter& p = parameters_.info(name);
  const std::int64_t first = parameters_.trainable_offset(name);
  return all.rows(first, first + p.numel()).reshape(p.shape).clone();
}

}  // namespace ballast
