#include "parallel/pipeline/tied_embedding.hpp"

#include <algorithm>
#include <sstream>

#include "kernels/ops/elementwise.hpp"

namespace ballast {

TiedEmbedding::TiedEmbedding(const Mesh& mesh, Parameters& parameters,
                             const ShardedOptimizer& optimizer, int zero_stage)
    : optimizer_(optimizer) {
  if (mesh.shape.pp == 1) return;
  std::string name;
  for (const Parameter& p : parameters.trainable_table())
    if (p.tied_copy) name = p.name;
  std::string tied;
  for (const std::string& n : mesh.pp.all_gather(name)) tied = n.empty() ? tied : n;
  if (tied.empty()) return;
  const bool first = mesh.at.pp == 0, last = mesh.at.pp == mesh.shape.pp - 1;
  const int replicas = mesh.replica.size();
  ends_ = mesh.world.split(first || last ? 0 : 1,
                           last ? replicas + mesh.replica.rank() : mesh.replica.rank());
  if (!first && !last) return;

  // What each rank holds, in elements of the embedding, which lies in one bucket.
  const std::int64_t offset = parameters.trainable_offset(tied),
                     numel = parameters.info(tied).numel();
  while (parameters.buckets().at(bucket_).end <= offset) ++bucket_;
  const ShardedOptimizer::Slice& slice = optimizer.slices().at(bucket_);
  const std::int64_t begin = std::clamp<std::int64_t>(slice.begin - offset, 0, numel);
  const std::int64_t end = std::clamp<std::int64_t>(slice.end - offset, 0, numel);
  const auto ranges = ends_.all_gather(fmt::format("{} {}", begin, end));
  for (int r = 0; r < replicas; ++r) {
    if (zero_stage == 0 && r != mesh.replica.rank())
      continue;  // every rank holds all: its counterpart will do
    Overlap overlap;
    overlap.peer = first ? replicas + r : r;
    std::istringstream text(ranges[static_cast<std::size_t>(overlap.peer)]);
    std::int64_t their_begin = 0, their_end = 0;
    text >> their_begin >> their_end;
    overlap.begin = std::max(begin, their_begin) + offset - slice.begin;
    overlap.end = std::min(end, their_end) + offset - slice.begin;
    if (overlap.begin < overlap.end) overlaps_.push_back(overlap);
  }
  // A rank may hold nothing of the embedding.
  ends_.set_up(device_of(parameters.values().space()));
}

void TiedEmbedding::sum_gradients() const {
  if (overlaps_.empty()) return;
  const Tensor own = optimizer_.shard_gradient(bucket_);
  std::vector<Transfer> transfers;
  std::vector<Tensor> received;
  for (const Overlap& o : overlaps_) {
    received.push_back(Tensor::empty({o.end - o.begin}, own.dtype(), device_of(own.space()),
                                     MemoryCategory::communication));
    transfers.push_back({received.back(), o.peer, false});
    transfers.push_back({own.rows(o.begin, o.end), o.peer, true});
  }
  ends_.exchange(transfers).complete();
  for (std::size_t i = 0; i < overlaps_.size(); ++i) {
    Tensor sum = own.rows(overlaps_[i].begin, overlaps_[i].end);
    add(sum, received[i], sum);
  }
}

}  // namespace ballast
