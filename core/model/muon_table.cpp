#include "core/model/muon_table.hpp"

#include <algorithm>
#include <numeric>

namespace ballast {

bool muon_updates(const Parameter& p) { return p.trainable && p.layer >= 0 && p.shape.size() == 2; }

void order_for_muon(std::vector<Parameter>& table) {
  const auto rank = [](const Parameter& p) { return !p.trainable ? 0 : muon_updates(p) ? 1 : 2; };
  // With adapters the table lists all frozen parameters first, so stages are not one run each; the
  // order inside a stage is what counts.
  std::stable_sort(table.begin(), table.end(), [&](const Parameter& a, const Parameter& b) {
    if (a.trainable != b.trainable) return !a.trainable;
    if (a.stage != b.stage) return a.stage < b.stage;
    return rank(a) < rank(b);
  });
}

double MuonMatrix::flops(int steps) const {
  const auto shorter = static_cast<double>(std::min(rows, columns)),
             elements = static_cast<double>(numel());
  return steps * (4 * shorter * elements + 2 * shorter * shorter * shorter);
}

MuonWork MuonWork::of(const std::vector<Parameter>& trainable) {
  MuonWork work;
  for (const Parameter& p : trainable) {
    if (!muon_updates(p)) break;
    work.matrices.push_back({work.elements, p.shape[0], p.shape[1]});
    work.elements += p.numel();
  }
  return work;
}

std::int64_t MuonWork::largest() const {
  std::int64_t most = 0;
  for (const MuonMatrix& m : matrices) most = std::max(most, m.numel());
  return most;
}

std::int64_t MuonWork::widest() const {
  std::int64_t most = 0;
  for (const MuonMatrix& m : matrices) most = std::max(most, std::min(m.rows, m.columns));
  return most;
}

std::int64_t MuonWork::workspace_bytes(DType type) const {
  // The matrix's next value, on a GPU also its present one, the Gram matrix and its polynomial.
  const std::int64_t matrices = type == DType::bf16 ? 2 : 1;
  return (matrices * largest() + 2 * widest() * widest()) *
         static_cast<std::int64_t>(size_of(type));
}

double MuonShards::busiest() const {
  return flops.empty() ? 0 : *std::max_element(flops.begin(), flops.end());
}

std::int64_t MuonShards::most_lent() const {
  return lent.empty() ? 0 : *std::max_element(lent.begin(), lent.end());
}

MuonShards muon_shards(const MuonWork& work, std::int64_t block, int ranks, int steps) {
  MuonShards shards;
  const std::size_t count = work.matrices.size();
  shards.owner.assign(count, 0);
  shards.flops.assign(static_cast<std::size_t>(ranks), 0.0);
  shards.lent.assign(static_cast<std::size_t>(ranks), 0);
  double even = 0;
  for (const MuonMatrix& m : work.matrices) even += m.flops(steps) / ranks;
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return work.matrices[a].flops(steps) > work.matrices[b].flops(steps);
  });
  const auto held = [&](const MuonMatrix& m, std::int64_t rank) {
    return std::max<std::int64_t>(
        0, std::min(m.end(), (rank + 1) * block) - std::max(m.begin, rank * block));
  };
  const auto give = [&](std::size_t i, std::size_t rank) {
    const MuonMatrix& m = work.matrices[i];
    shards.owner[i] = static_cast<int>(rank);
    shards.flops[rank] += m.flops(steps);
    shards.lent[rank] += m.numel() - held(m, static_cast<std::int64_t>(rank));
  };
  std::vector<std::size_t> left;
  for (const std::size_t i : order) {
    const MuonMatrix& m = work.matrices[i];
    std::int64_t holder = m.begin / block;
    for (std::int64_t r = holder; r * block < m.end(); ++r)
      if (held(m, r) > held(m, holder)) holder = r;
    const auto at = static_cast<std::size_t>(holder);
    if (shards.flops[at] + m.flops(steps) <= 1.001 * even)
      give(i, at);
    else
      left.push_back(i);
  }
  for (const std::size_t i : left)
    give(i, static_cast<std::size_t>(std::min_element(shards.flops.begin(), shards.flops.end()) -
                                     shards.flops.begin()));
  return shards;
}

std::vector<MuonShare> muon_shares(const MuonWork& work, std::int64_t block,
                                   const MuonShards& shards, DType type) {
  std::vector<MuonShare> shares;
  for (std::size_t r = 0; r < shards.flops.size(); ++r) {
    const std::int64_t begin = static_cast<std::int64_t>(r) * block, end = begin + block;
    MuonShare share;
    share.elements = std::clamp<std::int64_t>(work.elements - begin, 0, block);
    MuonWork own;
    for (std::size_t i = 0; i < work.matrices.size(); ++i) {
      const MuonMatrix& m = work.matrices[i];
      if (shards.owner[i] != static_cast<int>(r)) continue;
      own.matrices.push_back(m);
      if (m.begin < begin || m.end() > end) share.lent += m.numel();
    }
    share.workspace_bytes = own.workspace_bytes(type);
    shares.push_back(share);
  }
  return shares;
}

MuonShare heaviest(const std::vector<MuonShare>& shares) {
  MuonShare most = shares.empty() ? MuonShare{} : shares.front();
  for (const MuonShare& share : shares) {
    most.elements = std::min(most.elements, share.elements);  // the others have two moments
    most.workspace_bytes = std::max(most.workspace_bytes, share.workspace_bytes);
    most.lent = std::max(most.lent, share.lent);
  }
  return most;
}

}  // namespace ballast
