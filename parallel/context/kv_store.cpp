#include "parallel/context/kv_store.hpp"

#include <algorithm>
#include <limits>

#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "kernels/ops/elementwise.hpp"
#include "parallel/comm/host_copy.hpp"

namespace ballast {

KvStore::KvStore(std::vector<ShardKeys> chunks, int rank, std::int64_t align, const KvPlace& place)
    : chunks_(std::move(chunks)), rank_(rank), align_(align), place_(place) {
  require(!chunks_.empty() && rank >= 0 && rank < ranks(), "KV store: {} chunks, ring rank {}",
          chunks_.size(), rank);
  offset_.push_back(0);
  std::int64_t largest = 1;
  for (const ShardKeys& chunk : chunks_) {
    require(static_cast<int>(chunk.size()) == ranks(), "KV store: chunks over {} and {} ring ranks",
            chunk.size(), ranks());
    std::int64_t tokens = 0;
    for (const auto& shard : chunk) tokens += token_count(shard);
    largest = std::max(largest, tokens);
    offset_.push_back(offset_.back() + token_count(chunk[static_cast<std::size_t>(rank)]));
  }
  window_chunks_ = static_cast<int>(std::max<std::int64_t>(1, place.window_tokens / largest));
}

std::pair<int, int> KvStore::range(int chunk, int turn) const {
  require(chunk >= 0 && chunk < chunks() && turn >= 0 && turn < turns(chunk),
          "KV store: turn {} of chunk {} of {}", turn, chunk, chunks());
  if (!place_.offload) return {0, chunk + 1};
  if (turn == 0) return {chunk, chunk + 1};
  return {(turn - 1) * window_chunks_, std::min(chunk, turn * window_chunks_)};
}

AttentionAxes KvStore::axes(int chunk) const {
  AttentionAxes axes;
  axes.rank = rank_;
  axes.align = align_;
  const ShardKeys& queries = chunks_.at(static_cast<std::size_t>(chunk));
  axes.queries = queries.at(static_cast<std::size_t>(rank_));
  std::int64_t first_query = std::numeric_limits<std::int64_t>::max();
  for (const auto& shard : queries)
    for (const AxisRange& range : shard)
      if (!range.padding()) first_query = std::min(first_query, range.position);
  axes.first_query = {first_query};
  const auto keys = [&](int first, int last, int shard) {
    AxisRanges list;
    for (int c = first; c < last; ++c) {
      for (const AxisRange& range :
           chunks_[static_cast<std::size_t>(c)][static_cast<std::size_t>(shard)])
        append(list, range);
    }
    return list;
  };
  ShardKeys all, by_turn;
  for (int shard = 0; shard < ranks(); ++shard) all.push_back(keys(0, chunk + 1, shard));
  axes.keys = std::move(all);
  if (!place_.offload) return axes;
  for (int turn = 0; turn < turns(chunk); ++turn) {
    const auto [first, last] = range(chunk, turn);
    for (int shard = 0; shard < ranks(); ++shard) by_turn.push_back(keys(first, last, shard));
  }
  axes.turns = std::move(by_turn);
  return axes;
}

Tensor KvStore::storage(const Shape& shape, DType type, Device& device,
                        RingBuffers::Lease& lease) const {
  if (!place_.offload) return Tensor::empty(shape, type, device, MemoryCategory::kv_store);
  lease = place_.host->take(shape, type, pinned_device());
  return lease.tensor;
}

Tensor KvStore::rows(const Tensor& pair, int which, std::int64_t first, std::int64_t last) const {
  const Tensor part = pair.rows(which, which + 1);
  return part.reshape({pair.size(1), pair.size(2), pair.size(3)}).rows(first, last);
}

RingBuffers::Lease KvStore::window(std::int64_t tokens, const Tensor& like) const {
  const Shape row{like.size(2), like.size(3)};
  return place_.device->take({2, tokens, row[0], row[1]}, like.dtype(), *device_,
                             window_elements(row));
}

RingBuffers::Lease KvStore::fetch(const Tensor& pair, std::int64_t begin, std::int64_t end,
                                  Fence after) const {
  RingBuffers::Lease lease = window(end - begin, pair);
  if (begin == end) return lease;
  device_->wait(lease.busy, Queue::to_device);
  device_->wait(after, Queue::to_device);
  lease.busy = copy_beside(*device_, Queue::to_device,
                           {{rows(lease.tensor, 0, 0, end - begin), rows(pair, 0, begin, end)},
                            {rows(lease.tensor, 1, 0, end - begin), rows(pair, 1, begin, end)}},
                           place_.recorder);
  return lease;
}

Fence KvStore::put_away(const Tensor& window, const Tensor& pair, std::int64_t begin,
                        std::int64_t end) const {
  if (begin == end) return {};
  return copy_beside(*device_, Queue::to_host,
                     {{rows(pair, 0, begin, end), rows(window, 0, 0, end - begin)},
                      {rows(pair, 1, begin, end), rows(window, 1, 0, end - begin)}},
                     place_.recorder);
}

void KvStore::put(LayerState& state, int chunk, const Tensor& k, const Tensor& v) {
  device_ = &device_of(k.space());
  const Shape row{k.size(1), k.size(2)};
  if (!state.kv.defined()) {
    state.kv = storage({2, offset_.back(), row[0], row[1]}, k.dtype(), *device_, state.kv_lease);
    state.stored.assign(chunks_.size(), false);
    state.put.assign(chunks_.size(), {});
    state.sum_type = k.dtype() == DType::f64 ? DType::f64 : DType::f32;
  }
  const auto c = static_cast<std::size_t>(chunk);
  const std::int64_t own = offset_[c + 1] - offset_[c];
  require(k.size(0) == own && v.shape() == k.shape(),
          "KV store: chunk {} has {} tokens on this rank, its keys {}", chunk, own,
          to_string(k.shape()));
  for (std::size_t earlier = 0; earlier < c; ++earlier)
    require(state.stored[earlier], "KV store: chunk {} runs before chunk {} is forwarded", chunk,
            earlier);
  if (state.stored[c]) return;
  state.stored[c] = true;
  if (own > 0) {
    RingBuffers::Lease packed;
    if (place_.offload) {  // their rows may lie apart, and they may go before they are copied
      packed = window(own, state.kv);
      wait_for_copy(*device_, packed.busy, place_.recorder);
    }
    const Tensor& to = place_.offload ? packed.tensor : state.kv;
    const std::int64_t begin = place_.offload ? 0 : offset_[c];
    Tensor to_k = rows(to, 0, begin, begin + own), to_v = rows(to, 1, begin, begin + own);
    copy_rows(k, to_k);
    copy_rows(v, to_v);
    if (place_.offload)
      state.put[c] = packed.busy = put_away(packed.tensor, state.kv, offset_[c], offset_[c + 1]);
  } else if (c > 0) {
    state.put[c] = state.put[c - 1];
  }
}

KvStore::Keys KvStore::keys(int layer, int chunk, int turn, const Tensor& k, const Tensor& v) {
  LayerState& state = layers_[layer];
  if (turn == 0) put(state, chunk, k, v);
  const auto [first, last] = range(chunk, turn);
  const std::int64_t begin = offset_[static_cast<std::size_t>(first)],
                     end = offset_[static_cast<std::size_t>(last)];
  Keys result;
  if (!place_.offload) {
    result.k = rows(state.kv, 0, begin, end);
    result.v = rows(state.kv, 1, begin, end);
  } else if (turn == 0) {
    result.k = k;
    result.v = v;
  } else {
    result.lease = fetch(state.kv, begin, end, state.put[static_cast<std::size_t>(last) - 1]);
    result.k = rows(result.lease.tensor, 0, 0, end - begin);
    result.v = rows(result.lease.tensor, 1, 0, end - begin);
  }
  return result;
}

void KvStore::arrive(Keys& keys) const {
  wait_for_copy(*device_, std::exchange(keys.lease.busy, {}), place_.recorder);
}

std::pair<Tensor, RingBuffers::Lease> KvStore::all_keys(int layer, int chunk, const Tensor& k,
                                                        const Tensor& v) {
  LayerState& state = layers_[layer];
  put(state, chunk, k, v);
  const std::int64_t end = offset_[static_cast<std::size_t>(chunk) + 1];
  const Tensor stored = rows(state.kv, 0, 0, end);
  if (!place_.offload) return {stored, RingBuffers::Lease()};
  RingBuffers::Lease lease = place_.device->take(stored.shape(), stored.dtype(), *device_);
  if (end > 0) {
    device_->wait(lease.busy, Queue::to_device);
    device_->wait(state.put[static_cast<std::size_t>(chunk)], Queue::to_device);
    wait_for_copy(
        *device_,
        copy_beside(*device_, Queue::to_device, {{lease.tensor, stored}}, place_.recorder),
        place_.recorder);
    lease.busy = {};
  }
  return {lease.tensor, std::move(lease)};
}

KvStore::Sums KvStore::sums(int layer, int chunk, int turn) {
  LayerState& state = layers_.at(layer);
  const Shape row{state.kv.size(2), state.kv.size(3)};
  if (!state.dkv.defined()) {
    require(chunk == chunks() - 1,
            "KV store: layer {} goes backward through chunk {} before the last one", layer, chunk);
    state.dkv =
        storage({2, offset_.back(), row[0], row[1]}, state.sum_type, *device_, state.dkv_lease);
    if (!place_.offload) state.dkv.zero();
  }
  const auto [first, last] = range(chunk, turn);
  const std::int64_t begin = offset_[static_cast<std::size_t>(first)],
                     end = offset_[static_cast<std::size_t>(last)];
  Sums sums;
  if (!place_.offload) {
    sums.dk = rows(state.dkv, 0, begin, end);
    sums.dv = rows(state.dkv, 1, begin, end);
    return sums;
  }
  sums.fresh = chunk == chunks() - 1;
  sums.lease =
      sums.fresh ? window(end - begin, state.dkv) : fetch(state.dkv, begin, end, state.kept);
  sums.dk = rows(sums.lease.tensor, 0, 0, end - begin);
  sums.dv = rows(sums.lease.tensor, 1, 0, end - begin);
  return sums;
}

void KvStore::arrive(Sums& sums) const {
  wait_for_copy(*device_, std::exchange(sums.lease.busy, {}), place_.recorder);
  if (sums.fresh) sums.lease.tensor.zero();
}

void KvStore::keep(int layer, int chunk, int turn, Sums& sums) {
  if (!place_.offload || turn == 0) return;  // in place already, or complete
  LayerState& state = layers_.at(layer);
  const auto [first, last] = range(chunk, turn);
  const std::int64_t begin = offset_[static_cast<std::size_t>(first)],
                     end = offset_[static_cast<std::size_t>(last)];
  if (begin < end)
    state.kept = sums.lease.busy = put_away(sums.lease.tensor, state.dkv, begin, end);
}

std::pair<std::int64_t, std::int64_t> KvStore::own_rows(int chunk) const {
  const auto c = static_cast<std::size_t>(chunk);
  const std::int64_t begin = place_.offload ? 0 : offset_[c];
  return {begin, begin + offset_[c + 1] - offset_[c]};
}

std::int64_t KvStore::window_elements(const Shape& row) const {
  std::int64_t most = 0;
  for (std::size_t first = 0; first < chunks_.size();
       first += static_cast<std::size_t>(window_chunks_)) {
    const std::size_t last =
        std::min(chunks_.size(), first + static_cast<std::size_t>(window_chunks_));
    most = std::max(most, offset_[last] - offset_[first]);
  }
  return 2 * most * row[0] * row[1];
}

void KvStore::finish(int layer, int chunk) {
  if (chunk == 0) layers_.erase(layer);
}

ChunkStores::ChunkStores(const std::vector<MicroBatch>& list,
                         const std::function<Shards(int)>& shards, const KvPlace& place)
    : list_(list), shards_(shards), place_(place), members_(list.size()) {
  for (std::vector<int>& group : chunk_groups(list)) {
    if (group.size() < 2) continue;
    for (int c = 0; c < static_cast<int>(group.size()); ++c)
      members_[static_cast<std::size_t>(group[static_cast<std::size_t>(c)])] = {
          static_cast<int>(groups_.size()), c};
    groups_.push_back(std::move(group));
  }
  stores_.resize(groups_.size());
  held_.resize(groups_.size());
}

StoredChunk ChunkStores::at(int micro_batch) {
  const Member member = members_.at(static_cast<std::size_t>(micro_batch));
  if (member.group < 0) return {};
  const auto g = static_cast<std::size_t>(member.group);
  StoredChunk stored{stores_[g].lock(), member.chunk};
  if (!stored.store) {
    std::vector<KvStore::ShardKeys> chunks;
    int rank = 0;
    for (const int m : groups_[g]) {
      Shards shards = shards_(m);
      chunks.push_back(std::move(shards.keys)), rank = shards.rank;
    }
    stored.store = std::make_shared<KvStore>(
        std::move(chunks), rank, list_[static_cast<std::size_t>(micro_batch)].align, place_);
    stores_[g] = held_[g] = stored.store;
  }
  if (member.chunk + 1 == static_cast<int>(groups_[g].size())) held_[g].reset();
  return stored;
}

}  // namespace ballast
