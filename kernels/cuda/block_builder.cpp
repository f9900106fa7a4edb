#include "kernels/cuda/block_builder.hpp"

#include <algorithm>

#include "kernels/cuda/attention_blocks.hpp"
#include "kernels/cuda/attention_pattern.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/index_mirror.hpp"

namespace ballast::cuda {
namespace {

Tensor workspace(Shape shape, DType type, Device& device) { return Tensor::empty(std::move(shape), type, device, MemoryCategory::workspace); }

Tensor upload(const std::vector<std::int32_t>& values, Device& device) {
  return Tensor::wrap(const_cast<std::int32_t*>(values.data()), {static_cast<std::int64_t>(values.size())}, DType::i32).to(device);
}

struct RowsOnGpu {
  Tensor first, own, rows;
  RowsOnGpu() = default;
  RowsOnGpu(const PatternRows& at, Device& device) : first(upload(at.first, device)), own(upload(at.own, device)), rows(upload(at.rows, device)) {}
  BlockRows view() const { return {static_cast<int>(own.numel()), first.data<std::int32_t>(), own.data<std::int32_t>(), rows.data<std::int32_t>()}; }
};

std::uint64_t* words_of(const Tensor& t) { return reinterpret_cast<std::uint64_t*>(t.data<std::int64_t>()); }

}  // namespace

struct BlockBuilder::Arrays {
  Device* device = nullptr;
  int rank = 0, widest = 0, pattern_blocks = 0;
  std::int64_t q_tokens = 0;
  RowsOnGpu queries;
  Tensor block_keys;
  struct Shard {
    std::int64_t tokens = 0;
    RowsOnGpu rows;
    Tensor key_begin, key_end;
  };
  std::vector<Shard> shards;
};

BlockBuilder::BlockBuilder(const AttentionAxes& axes, const KeyAxis& axis, const PatternRows& queries, const std::vector<PatternRows>& keys,
                           const std::vector<std::int32_t>& block_keys, int widest, Device& device)
    : arrays_(std::make_shared<Arrays>()) {
  Arrays& a = *arrays_;
  a.device = &device;
  a.rank = axes.rank;
  a.widest = widest;
  a.pattern_blocks = static_cast<int>(block_keys.size());
  a.q_tokens = static_cast<std::int64_t>(axes.queries.size());
  a.queries = RowsOnGpu(queries, device);
  a.block_keys = upload(block_keys, device);
  const std::vector<AttentionIndex> seen = split_keys(visible_index(axes.queries, axis, 1), axis, axes.keys);
  for (std::size_t k = 0; k < axes.keys.size(); ++k)
    a.shards.push_back({static_cast<std::int64_t>(axes.keys[k].size()), RowsOnGpu(keys[k], device), upload(seen[k].key_begin, device), upload(seen[k].key_end, device)});
}

BlockBuilder::~BlockBuilder() = default;

Tensor BlockBuilder::pool(const Tensor& k) const {
  const Arrays& a = *arrays_;
  const int columns = static_cast<int>(k.size(1) * k.size(2));
  require(k.size(0) == a.shards[a.rank].tokens && (k.size(0) == 0 || k.strides()[1] == k.size(2)), "moba: k {} does not fit the {} keys here", to_string(k.shape()),
          a.shards[a.rank].tokens);
  Tensor sums = Tensor::zeros({a.pattern_blocks, columns}, DType::i64, *a.device, MemoryCategory::workspace);
  check(pool_keys(k.raw(), k.strides()[0], columns, a.shards[a.rank].rows.view(), sums.data<std::int64_t>(), stream()), "pooling of keys");
  return sums;
}

Tensor BlockBuilder::route(const Tensor& q, const Tensor& sums, std::int64_t top_k) const {
  const Arrays& a = *arrays_;
  require(a.widest <= 3072, "moba on CUDA: a segment of {} blocks, at most 3072; use a larger attention.moba_block", a.widest);
  require(q.size(2) == 64 || q.size(2) == 128, "attention on CUDA needs a head dim of 64 or 128, got {}", q.size(2));
  const int columns = static_cast<int>(sums.size(1));
  const Tensor high = workspace(sums.shape(), DType::bf16, *a.device), low = workspace(sums.shape(), DType::bf16, *a.device);
  check(mean_keys(sums.data<std::int64_t>(), a.block_keys.data<std::int32_t>(), a.pattern_blocks, columns, high.raw(), low.raw(), stream()), "means of keys");
  Routing x;
  x.q = q.raw();
  x.q_stride = q.size(0) > 0 ? q.strides()[0] : 0;
  x.tokens = q.size(0);
  x.high = high.raw();
  x.low = low.raw();
  x.q_heads = static_cast<int>(q.size(1));
  x.head_dim = static_cast<int>(q.size(2));
  x.kv_heads = columns / x.head_dim;
  x.at = a.queries.view();
  x.top_k = static_cast<int>(std::min<std::int64_t>(top_k, 1 << 30));
  x.width = a.widest;
  Tensor words = workspace({q.size(1), x.at.blocks, a.widest}, DType::i64, *a.device);
  check(route_queries(x, words_of(words), stream()), "routing of queries");
  return words;
}

std::vector<AttentionIndex> BlockBuilder::build(const Tensor& words, int q_heads, int kv_heads) const {
  const Arrays& a = *arrays_;
  Device& device = *a.device;
  const std::int64_t shards = static_cast<std::int64_t>(a.shards.size()), lists = q_heads * a.queries.own.numel();
  const auto choice = [&](const Arrays::Shard& shard) {
    return BlockChoice{words_of(words), q_heads, a.widest, a.queries.view(), shard.rows.view(), shard.key_begin.data<std::int32_t>(), shard.key_end.data<std::int32_t>(),
                       a.q_tokens};
  };
  Tensor sizes = Tensor::zeros({3, shards}, DType::i64, device, MemoryCategory::workspace);  // runs, block pairs, pairs
  std::vector<Tensor> offsets;
  for (std::int64_t k = 0; k < shards; ++k) {
    offsets.push_back(Tensor::zeros({lists + 1}, DType::i64, device, MemoryCategory::workspace));
    check(count_block_runs(choice(a.shards[k]), offsets.back().data<std::int64_t>(), words_of(sizes) + shards + k, stream()), "counting of runs");
    Tensor to = sizes.rows(0, 1).reshape({shards}).rows(k, k + 1);
    to.copy_from(offsets.back().rows(lists, lists + 1));
  }
  const Tensor found = sizes.to(host_device());
  std::vector<AttentionIndex> built;
  for (std::int64_t k = 0; k < shards; ++k) {
    const Arrays::Shard& shard = a.shards[k];
    IndexShape shape;
    shape.q_tokens = a.q_tokens;
    shape.k_tokens = shard.tokens;
    shape.q_heads = shape.index_heads = q_heads;
    shape.kv_heads = kv_heads;
    shape.runs = shape.row_masks = std::max<std::int64_t>(1, found.data<std::int64_t>()[k]);
    shape.block_pairs = std::max<std::int64_t>(1, found.data<std::int64_t>()[shards + k]);
    // The arrays that do not depend on the choice stay with the builder, the offsets with the mirror.
    auto mirror = std::make_shared<IndexMirror>();
    mirror->q_heads = q_heads;
    mirror->kv_heads = kv_heads;
    mirror->shared = std::make_shared<std::pair<std::shared_ptr<Arrays>, Tensor>>(arrays_, offsets[k]);
    mirror->buffer = workspace({static_cast<std::int64_t>(index_bytes(shape))}, DType::u8, device);
    mirror->index = bind_index(shape, mirror->buffer.raw());
    mirror->index.key_begin = shard.key_begin.data<std::int32_t>();
    mirror->index.key_end = shard.key_end.data<std::int32_t>();
    mirror->index.run_offset = offsets[k].data<std::int64_t>();
    check(fill_block_runs(mirror->index, choice(shard), stream()), "building of the attention index");
    check(derive_index(mirror->index, stream()), "preparation of the attention index");
    check(count_pairs(mirror->index, words_of(sizes) + 2 * shards + k, stream()), "pairs of the attention index");
    AttentionIndex index;
    index.q_tokens = a.q_tokens;
    index.k_tokens = shard.tokens;
    index.index_heads = q_heads;
    index.mirror = std::move(mirror);
    built.push_back(std::move(index));
  }
  const Tensor pairs = sizes.to(host_device());
  for (std::int64_t k = 0; k < shards; ++k) built[k].pairs = static_cast<double>(pairs.data<std::int64_t>()[2 * shards + k]) / q_heads;
  return built;
}

}  // namespace ballast::cuda
