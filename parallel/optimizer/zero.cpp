#include "parallel/optimizer/zero.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
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
  const std::int64_t ranks = replica.size();
  std::int64_t n = 0;
  for (const StoredBucket& bucket : parameters.buckets()) {
    require(bucket.size() % ranks == 0,
            "{} parameters do not divide over {} ranks: pad buckets to a multiple of {}",
            bucket.size(), ranks, ranks);
    const std::int64_t part = bucket.size() / (zero_stage == 0 ? 1 : ranks),
                       begin = bucket.begin + (zero_stage == 0 ? 0 : part * replica.rank());
    slices_.push_back({begin, begin + part, n});
    n += part;
  }
  if (muon) {
    require(zero_stage < 2, "optimizer.kind = \"muon\" is not run with optimizer.zero = 2: set 1");
    require(slices_.size() <= 1, "Muon: {} buckets in place of one", slices_.size());
    const Slice all = slices_.empty() ? Slice{} : slices_.front();
    muon_.emplace(parameters, replica, zero_stage == 1, all.begin, all.end, *muon);
  }
  const std::int64_t adamw = n - muon_part();
  const DType sums = parameters.sum_type();
  Device& device = device_of(parameters.space());
  require(!muon || !options.bf16_moments, "Muon keeps its moments in full precision");
  require(!muon || parameters.gradient_type() == sums, "Muon keeps gradients in full precision");
  const DType moments = options.bf16_moments ? DType::bf16 : sums;
  const auto state = [&](std::int64_t elements, DType type) {
    return Tensor::zeros({elements}, type, device, MemoryCategory::optimizer);
  };
  state_.master =
      parameters.dtype() == sums && in_place()
          ? parameters.trainable_values().rows(slices_.front().begin, slices_.front().begin + n)
          : state(n, sums);
  state_.moment1 = state(n, moments);
  state_.moment2 = state(adamw, moments);
  for (const Slice& slice : slices_)
    decay_.push_back(decay_ranges(parameters, slice.begin + muon_part(), slice.end, device));
  if (zero_stage == 2)
    shard_gradient_ = Tensor::zeros({n}, sums, device, MemoryCategory::gradients);
  summed_.resize(slices_.size());
  if (replica.size() > 1) {
    beside_ = replica.split(0, replica.rank());
    beside_.set_up(device);  // ranks should not wait for it inside a backward
  }
  parameters_.on_values_needed([this](std::int64_t layer) { finish_updates(layer); });
}

ShardedOptimizer::~ShardedOptimizer() {
  parameters_.on_values_needed({});
  // Memory goes back in the order of the compute queue.
  if (updates_.empty()) return;
  try {
    device_of(parameters_.space()).wait(updates_.back().done, Queue::compute);
  } catch (const std::exception&) {  // the device has failed
  }
}

bool ShardedOptimizer::in_place() const {
  std::int64_t gaps = 0;
  for (std::size_t b = 1; b < slices_.size(); ++b) gaps += slices_[b].begin != slices_[b - 1].end;
  return gaps == 0 && !slices_.empty();
}

std::int64_t ShardedOptimizer::shard_size() const {
  return slices_.empty() ? 0 : slices_.back().at + slices_.back().size();
}

std::vector<ShardRun> ShardedOptimizer::runs() const {
  std::vector<ShardRun> runs;
  for (std::size_t b = 0; b < slices_.size(); ++b) {
    const StoredBucket& bucket = parameters_.buckets()[b];
    const std::int64_t before = bucket.begin - bucket.first,  // padding
        begin = slices_[b].begin - before, end = std::min(slices_[b].end - before, bucket.last);
    if (begin < end) runs.push_back({begin, end, slices_[b].at});
  }
  return runs;
}

Tensor ShardedOptimizer::shard_gradient(std::size_t bucket) const {
  const Slice& slice = slices_.at(bucket);
  return zero_stage_ == 2 ? shard_gradient_.rows(slice.at, slice.at + slice.size())
                          : parameters_.gradients().rows(slice.begin, slice.end);
}

void ShardedOptimizer::begin_step() {
  parameters_.clear_gradients();
  left_ = slices_.size();
  std::fill(summed_.begin(), summed_.end(), char{0});
}

void ShardedOptimizer::start_reduction(std::size_t b) {
  finish_updates(kHeadLayer);                 // of the step before, where this rank had no forward
  if (zero_stage_ == 2) finish_reductions();  // so that few buckets exist at a time
  Scope scope(recorder_, EventKind::gradient_reduce);
  const StoredBucket& bucket = parameters_.buckets()[b];
  const Slice& slice = slices_[b];
  Tensor all = parameters_.settle_gradients(b);
  Tensor own = all.rows(slice.begin - bucket.begin, slice.end - bucket.begin);  // in place
  const std::int64_t ranks = replica_.size();
  scope.bytes = static_cast<std::int64_t>(all.bytes()) / ranks * (ranks - 1);
  if (zero_stage_ == 0) scope.bytes *= 2;
  Pending pending;  // alone this rank has the sum
  if (ranks > 1)
    pending =
        zero_stage_ == 0 ? beside_.all_reduce_beside(all) : beside_.reduce_scatter_beside(all, own);
  if (zero_stage_ == 2) parameters_.release_gradients(b);
  reductions_.push_back({b, zero_stage_ == 2 ? own : Tensor(), std::move(pending)});
}

void ShardedOptimizer::finish_reductions() {
  if (reductions_.empty()) return;
  Scope scope(recorder_, EventKind::gradient_reduce);
  for (; !reductions_.empty(); reductions_.pop_front()) {
    Flight& flight = reductions_.front();
    if (flight.pending.active()) flight.pending.complete();
    if (zero_stage_ < 2) continue;
    Tensor sum = shard_gradient(flight.bucket);
    if (std::exchange(summed_[flight.bucket], char{1}))
      add(sum, flight.own, sum);
    else
      copy_rows(flight.own, sum);
  }
}

void ShardedOptimizer::gradients_final(std::int64_t layer) {
  while (left_ > 0 && parameters_.buckets()[left_ - 1].final_at >= layer) start_reduction(--left_);
}

void ShardedOptimizer::end_round() {
  if (zero_stage_ < 2) return;
  while (left_ > 0) start_reduction(--left_);
  finish_reductions();
  left_ = slices_.size();
}

void ShardedOptimizer::reduce_gradients() {
  if (zero_stage_ == 2) left_ = 0;  // by rounds
  while (left_ > 0) start_reduction(--left_);
  finish_reductions();
}

double ShardedOptimizer::squared_norm() {
  Scope scope(recorder_, EventKind::gradient_reduce);
  // The tied copy is the last parameter of its stage.
  std::int64_t counted = std::numeric_limits<std::int64_t>::max();
  for (const Parameter& p : parameters_.trainable_table())
    if (p.tied_copy) counted = parameters_.trainable_offset(p.name);
  // Rank by rank, then bucket by bucket, in every stage: the norm has the same bits.
  std::vector<Tensor> parts;
  const int holders = zero_stage_ == 0 ? replica_.size() : 1;
  for (int r = 0; r < holders; ++r)
    for (std::size_t b = 0; b < slices_.size(); ++b) {
      const std::int64_t part = slices_[b].size() / holders, begin = slices_[b].begin + part * r,
                         end = std::min(begin + part, counted);
      parts.push_back(shard_gradient(b).rows(begin - slices_[b].begin,
                                             std::max(begin, end) - slices_[b].begin));
    }
  const std::vector<double> squares = sums_of_squares(parts);
  double sum = 0;
  for (int r = 0; r < holders; ++r) {
    double of_rank = 0;
    for (std::size_t b = 0; b < slices_.size(); ++b)
      of_rank += squares[static_cast<std::size_t>(r) * slices_.size() + b];
    sum += of_rank;
  }
  return zero_stage_ > 0 ? replica_.all_reduce(sum) : sum;
}

std::size_t ShardedOptimizer::first_beside(double forward_tokens) const {
  const std::vector<StoredBucket>& buckets = parameters_.buckets();
  const bool shared = zero_stage_ > 0 && replica_.size() > 1;
  if (muon_ || shared || buckets.empty() || forward_tokens < kTokensBeside) return buckets.size();
  const std::int64_t first_layer = std::max<std::int64_t>(0, buckets.front().final_at);
  std::size_t b = 0;
  while (b < buckets.size() && buckets[b].final_at <= first_layer) ++b;
  return b;
}

void ShardedOptimizer::apply(double gradient_scale, double learning_rate, std::int64_t step,
                             double forward_tokens) {
  const std::int64_t first = muon_part();
  const Tensor values = parameters_.trainable_values();
  Device& device = device_of(parameters_.space());
  const std::size_t beside = first_beside(forward_tokens);
  if (muon_) {
    const std::int64_t begin = slices_.front().begin;
    muon_->apply(state_.moment1.rows(0, first), shard_gradient(0).rows(0, first),
                 state_.master.rows(0, first), values.rows(begin, begin + first), gradient_scale,
                 learning_rate, recorder_);
  }
  for (std::size_t b = 0; b < slices_.size(); ++b) {
    const Queue queue = b < beside ? Queue::compute : Queue::update;
    if (b == beside) device.wait(device.fence(Queue::compute), Queue::update);
    {
      Scope scope(recorder_, EventKind::optimizer);
      const Slice& slice = slices_[b];
      const std::int64_t from = slice.at + first, to = slice.at + slice.size();
      const StoredBucket& bucket = parameters_.buckets()[b];
      AdamWState state{state_.master.rows(from, to), state_.moment1.rows(from, to),
                       state_.moment2.rows(from - first, to - first), decay_[b],
                       number_of(bucket, slice.begin + first)};
      Tensor rest = values.rows(slice.begin + first, slice.end);
      adamw_step(state, shard_gradient(b).rows(first, slice.size()), gradient_scale, learning_rate,
                 step, options_, rest, queue);
    }
    if (queue == Queue::update)
      if (const Fence done = device.fence(queue); !done.empty()) updates_.push_back({b, done});
    start_gather(b, values);
  }
  parameters_.values_changed();
}

std::int64_t ShardedOptimizer::number_of(const StoredBucket& bucket, std::int64_t offset) const {
  const std::int64_t number = bucket.first + offset - bucket.begin;
  const std::vector<Parameter>& table = parameters_.trainable_table();
  if (table.empty() || !table.back().tied_copy) return number;
  return number - (parameters_.buckets().back().last - table.back().numel());
}

std::int64_t ShardedOptimizer::muon_part() const {
  if (!muon_) return 0;
  const Slice& all = slices_.front();
  return std::clamp<std::int64_t>(muon_elements() - all.begin, 0, all.size());
}

void ShardedOptimizer::start_gather(std::size_t b, const Tensor& values) {
  if (zero_stage_ == 0 || replica_.size() == 1) return;
  Scope scope(recorder_, EventKind::parameter_gather);
  const StoredBucket& bucket = parameters_.buckets()[b];
  Tensor all = values.rows(bucket.begin, bucket.end);
  const Tensor own = values.rows(slices_[b].begin, slices_[b].end);
  scope.bytes = static_cast<std::int64_t>(own.bytes()) * (replica_.size() - 1);
  gathers_.push_back({b, {}, beside_.all_gather_beside(own, all)});
}

void ShardedOptimizer::finish_updates(std::int64_t layer) {
  const auto read = [&](const auto& list) {
    return !list.empty() && parameters_.buckets()[list.front().bucket].final_at <= layer;
  };
  if (!read(updates_) && !read(gathers_)) return;
  Scope scope(recorder_, EventKind::parameter_gather);
  Device& device = device_of(parameters_.space());
  for (; read(updates_); updates_.pop_front()) device.wait(updates_.front().done, Queue::compute);
  for (; read(gathers_); gathers_.pop_front())
    if (gathers_.front().pending.active()) gathers_.front().pending.complete();
}

void ShardedOptimizer::reset_master_from_values() {
  const Tensor values = parameters_.trainable_values();
  for (const Slice& slice : slices_) {
    Tensor master = state_.master.rows(slice.at, slice.at + slice.size());
    const Tensor own = values.rows(slice.begin, slice.end);
    if (master.raw() != own.raw()) copy_rows(own, master);
  }
}

void ShardedOptimizer::values_from_master() {
  const Tensor values = parameters_.trainable_values();
  for (std::size_t b = 0; b < slices_.size(); ++b) {
    const Slice& slice = slices_[b];
    const Tensor master = state_.master.rows(slice.at, slice.at + slice.size());
    Tensor own = values.rows(slice.begin, slice.end);
    if (master.raw() != own.raw()) copy_rows(master, own);
    start_gather(b, values);
  }
  parameters_.need_values();
  parameters_.values_changed();
}

Tensor ShardedOptimizer::bucket_gradient(std::size_t bucket) {
  const auto made = [&](std::int64_t elements, DType type) {
    return Tensor::empty({elements}, type, device_of(parameters_.space()),
                         MemoryCategory::workspace);
  };
  const Tensor own = shard_gradient(bucket);
  Tensor all = own;
  if (zero_stage_ > 0) {
    all = made(parameters_.buckets()[bucket].size(), own.dtype());
    replica_.all_gather(own, all);
  }
  if (all.dtype() == parameters_.sum_type()) return all;
  Tensor wide = made(all.numel(), parameters_.sum_type());
  copy_rows(all, wide);
  return wide;
}

Tensor ShardedOptimizer::full_gradient(const std::string& name) {
  const Parameter& p = parameters_.info(name);
  const std::int64_t offset = parameters_.trainable_offset(name);
  std::size_t b = 0;
  while (parameters_.buckets().at(b).end <= offset) ++b;
  const std::int64_t first = offset - parameters_.buckets()[b].begin;
  return bucket_gradient(b).rows(first, first + p.numel()).reshape(p.shape).clone();
}

}  // namespace ballast
