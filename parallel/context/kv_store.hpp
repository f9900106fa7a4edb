// Stored keys and values of samples that are cut into dependent chunks (ChunkFlow Section 4.2):
// every chunk attends to those of the chunks before it, and leaves its share of their gradients in
// accumulators.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/observe/events.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "core/plan/attention/vertical_slash.hpp"
#include "core/plan/context/axis_range.hpp"
#include "parallel/context/ring_buffers.hpp"

namespace ballast {

/// Where stored state lies, and what it is lent from; one for all samples and steps.
struct KvPlace {
  bool offload = false;  ///< keys, values and accumulators in pinned host memory, brought to the
                         ///< device window by window
  /// Offload: tokens of a window, over all ring ranks; at least one chunk.  Two windows are on the
  /// device: one is computed with while the next one comes and the sums of the one before it go.
  std::int64_t window_tokens = 8192;
  Recorder* recorder =
      nullptr;  ///< takes an offload or fetch event with the bytes of every transfer
  std::shared_ptr<RingBuffers> host = std::make_shared<RingBuffers>(MemoryCategory::offloaded);
  std::shared_ptr<RingBuffers> device = std::make_shared<RingBuffers>(MemoryCategory::kv_store);
};

/// Keys and values of one sample, for the layers of one stage, as one ring rank holds them: its
/// slices of every chunk, in order.
///
/// A chunk's attention walks its keys in turns round the ring.  Turn 0 has the chunk's own keys;
/// where the store lies on the device, those of all chunks before it too.  With offload, turns 1, 2
/// ... are windows of the chunks before it.  Forward stores a chunk's keys the first time and takes
/// them from there when it runs again (recomputation).  Backward goes through the chunks from the
/// last to the first.
class KvStore {
 public:
  using ShardKeys = std::vector<AxisRanges>;  ///< [ring rank]
  SlashCarry carry;  ///< choices that an index made for the chunk behind it
  /// chunks[c]: tokens that each ring rank holds of chunk c.  `place` must outlive the store.
  KvStore(std::vector<ShardKeys> chunks, int rank, std::int64_t align, const KvPlace& place);

  int chunks() const { return static_cast<int>(chunks_.size()); }
  int ranks() const { return static_cast<int>(chunks_.front().size()); }
  int turns(int chunk) const { return 1 + windows(chunk); }
  /// Queries of a chunk, its keys and those of every turn.
  AttentionAxes axes(int chunk) const;
  /// Keys of a chunk and of all before it, [tokens, Hkv, D], for an index that is chosen by looking
  /// at them; k: the chunk's own.  Held on the device whole, for the time of the lease.
  std::pair<Tensor, RingBuffers::Lease> all_keys(int layer, int chunk, const Tensor& k,
                                                 const Tensor& v);

  /// One turn's keys and values of this rank, [tokens, Hkv, D]; valid after arrive() and while the
  /// lease is held.
  struct Keys {
    Tensor k, v;
    RingBuffers::Lease lease;
  };
  /// Starts to bring them to the device, beside the computation that is queued next.  k, v: the
  /// chunk's own, from its forward.
  Keys keys(int layer, int chunk, int turn, const Tensor& k, const Tensor& v);
  /// Computation from now on finds them.
  void arrive(Keys& keys) const;

  /// One turn's accumulators of dK and dV in f32 (f64), with what later chunks have added; to be
  /// added to after arrive(), then handed to keep().
  struct Sums {
    Tensor dk, dv;
    RingBuffers::Lease lease;
    bool fresh = false;  ///< nothing has been added yet: arrive() makes them zero
  };
  Sums sums(int layer, int chunk, int turn);
  void arrive(Sums& sums) const;
  /// Keeps the sums of earlier chunks, beside the computation that is queued next.  After the last
  /// turn those of the chunk itself are complete.
  void keep(int layer, int chunk, int turn, Sums& sums);
  /// Rows of turn 0 that are the chunk's own.
  std::pair<std::int64_t, std::int64_t> own_rows(int chunk) const;
  /// A layer's backward of chunk `chunk` is done; after that of chunk 0 its memory is given back.
  void finish(int layer, int chunk);

 private:
  struct LayerState {
    Tensor kv, dkv;  ///< [2, tokens, Hkv, D] of this rank's slices of all chunks (dkv: but the
                     ///< last), K (dK) first
    RingBuffers::Lease kv_lease, dkv_lease;
    std::vector<bool> stored;  ///< [chunk]
    std::vector<Fence>
        put;     ///< [chunk] its way to host memory; those of earlier chunks lie before it
    Fence kept;  ///< the same of the sums that were kept last
    DType sum_type = DType::f32;
  };
  int windows(int chunk) const {
    return place_.offload ? (chunk + window_chunks_ - 1) / window_chunks_ : 0;
  }
  /// Chunks [first, second) of a turn.
  std::pair<int, int> range(int chunk, int turn) const;
  Tensor storage(const Shape& shape, DType type, Device& device, RingBuffers::Lease& lease) const;
  /// K (which = 0) or V (1) of chunks [first, last) in a layer's tensor.
  Tensor rows(const Tensor& pair, int which, std::int64_t first, std::int64_t last) const;
  /// Brings rows [begin, end) of a layer's tensor to a buffer on the device, which holds K in its
  /// first half, V in its second.
  RingBuffers::Lease fetch(const Tensor& pair, std::int64_t begin, std::int64_t end,
                           Fence after) const;
  /// Puts such a buffer back; returns the fence of the copy.
  Fence put_away(const Tensor& window, const Tensor& pair, std::int64_t begin,
                 std::int64_t end) const;
  void put(LayerState& state, int chunk, const Tensor& k, const Tensor& v);
  /// Buffer for a window of `tokens`.
  RingBuffers::Lease window(std::int64_t tokens, const Tensor& like) const;
  /// Elements of the largest window, K and V together.
  std::int64_t window_elements(const Shape& row) const;

  std::vector<ShardKeys> chunks_;
  int rank_;
  std::int64_t align_;
  const KvPlace& place_;
  int window_chunks_ = 1;
  std::vector<std::int64_t> offset_;  ///< [chunks + 1] this rank's first row of each chunk
  std::map<int, LayerState> layers_;
  Device* device_ = nullptr;
};

/// Place of a micro-batch in its sample's store; without a store it stands alone.
struct StoredChunk {
  std::shared_ptr<KvStore> store;
  int chunk = 0;
  /// What a chunk's index takes from that of the chunk before; null without a store.
  std::shared_ptr<SlashCarry> carry() const {
    return store ? std::shared_ptr<SlashCarry>(store, &store->carry) : nullptr;
  }
};

/// The stores of a list of micro-batches (core/plan/pipeline/pipeline_schedule's chunk groups).  A
/// store lives as long as work of its chunks is held.
class ChunkStores {
 public:
  /// What each rank of a micro-batch's ring holds of it, and which of them this rank is.
  struct Shards {
    KvStore::ShardKeys keys;
    int rank = 0;
  };
  /// `shards`: of a micro-batch, by its place in the list.  `place` must outlive the stores.
  /// Errors: those of chunk_groups.
  ChunkStores(const std::vector<MicroBatch>& list, const std::function<Shards(int)>& shards,
              const KvPlace& place);
  StoredChunk at(int micro_batch);

 private:
  struct Member {
    int group = -1, chunk = 0;
  };
  std::vector<MicroBatch> list_;
  std::function<Shards(int)> shards_;
  const KvPlace& place_;
  std::vector<std::vector<int>> groups_;  ///< those of more than one chunk
  std::vector<Member> members_;           ///< [micro-batch]
  std::vector<std::weak_ptr<KvStore>> stores_;
  std::vector<std::shared_ptr<KvStore>> held_;  ///< until the group's last chunk is asked for
};

}  // namespace ballast
