// Shared by the tests on several ranks: random data that all ranks agree on, and shapes of meshes
// for any number of ranks.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/base/number.hpp"
#include "core/base/random.hpp"
#include "core/base/tensor.hpp"
#include "core/plan/context/mesh_shape.hpp"
#include "parallel/comm/mesh.hpp"
#include "tests/seed.hpp"

namespace ballast::testing {

/// Draws that are the same on every rank as long as the ranks draw alike.
class SharedDraw {
 public:
  explicit SharedDraw(std::uint64_t stream) : stream_(stream) {}
  std::string trace() const { return fmt::format("repeat with BALLAST_TEST_SEED={}", test_seed()); }
  double normal() { return random_normal(test_seed(), stream_, counter_++); }
  double uniform() { return random_uniform(test_seed(), stream_, counter_++); }
  /// Integer in [low, high].
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random_bits(test_seed(), stream_, counter_++) %
                                           static_cast<std::uint64_t>(high - low + 1));
  }
  std::vector<double> normals(std::int64_t n) {
    std::vector<double> list(static_cast<std::size_t>(n));
    for (double& x : list) x = normal();
    return list;
  }

 private:
  std::uint64_t stream_, counter_ = 0;
};

/// |a - b|_2 / |b|_2; NaN counts as infinite.
inline double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  if (std::isnan(difference) || std::isnan(size)) return INFINITY;
  return size > 0 ? std::sqrt(difference / size) : std::sqrt(difference);
}

/// Elements of a contiguous tensor as double.
inline std::vector<double> elements(const Tensor& t) {
  std::vector<double> list(static_cast<std::size_t>(t.numel()));
  if (t.dtype() == DType::bf16) {
    for (std::size_t i = 0; i < list.size(); ++i) list[i] = number(t.data<bf16>()[i]);
    return list;
  }
  dispatch_float(t.dtype(), [&](auto x) {
    for (std::size_t i = 0; i < list.size(); ++i) list[i] = t.data<decltype(x)>()[i];
  });
  return list;
}

inline bool bit_equal(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() &&
         (a.bytes() == 0 || std::memcmp(a.raw(), b.raw(), a.bytes()) == 0);
}

/// Every dp x cp_outer x cp_inner that fills `ranks`.
inline std::vector<MeshShape> data_and_context_meshes(int ranks) {
  std::vector<MeshShape> list;
  for (int dp = 1; dp <= ranks; ++dp)
    for (int outer = 1; dp * outer <= ranks; ++outer)
      if (ranks % (dp * outer) == 0) {
        MeshShape shape;
        shape.dp = dp;
        shape.cp_outer = outer;
        shape.cp_inner = ranks / dp / outer;
        list.push_back(shape);
      }
  return list;
}

/// Every dp x cp_outer x cp_inner x sp that fills `ranks` and has an sp of 2 or more that divides
/// `heads`.
inline std::vector<MeshShape> sequence_meshes(int ranks, std::int64_t heads) {
  std::vector<MeshShape> list;
  for (int sp = 2; sp <= ranks; ++sp)
    if (ranks % sp == 0 && heads % sp == 0)
      for (MeshShape shape : data_and_context_meshes(ranks / sp)) {
        shape.sp = sp;
        list.push_back(shape);
      }
  return list;
}

/// The mesh of a shape, made once for all tests: new communicators cost much where ranks share
/// cores.  Collective at first.
inline const Mesh& mesh_of(const MeshShape& shape, const std::vector<int>& joined = {},
                           std::int64_t query_heads = 0) {
  struct Made {
    std::vector<int> joined;
    std::int64_t query_heads;
    std::unique_ptr<Mesh> mesh;
  };
  static std::vector<Made> made;
  for (const Made& m : made)
    if (m.mesh->shape == shape && m.joined == joined && m.query_heads == query_heads)
      return *m.mesh;
  auto mesh = std::make_unique<Mesh>(Communicator::world(), shape, joined, query_heads);
  return *made.emplace_back(Made{joined, query_heads, std::move(mesh)}).mesh;
}

}  // namespace ballast::testing
