// Muon's operations against plain fp64 loops: momentum, the Newton-Schulz iteration, the update.
#include "kernels/ops/muon.hpp"
#include "tests/kernels/ops/operation_test.hpp"

namespace ballast::numeric {
namespace {

using Rows = std::vector<std::vector<double>>;

Rows rows_of(const std::vector<double>& flat, std::int64_t m, std::int64_t n) {
  Rows rows(static_cast<std::size_t>(m));
  for (std::size_t i = 0; i < rows.size(); ++i)
    rows[i].assign(flat.begin() + static_cast<std::ptrdiff_t>(i) * n,
                   flat.begin() + static_cast<std::ptrdiff_t>(i + 1) * n);
  return rows;
}
Rows product(const Rows& a, const Rows& b) {
  Rows c(a.size(), std::vector<double>(b[0].size(), 0.0));
  for (std::size_t i = 0; i < a.size(); ++i)
    for (std::size_t k = 0; k < b.size(); ++k)
      for (std::size_t j = 0; j < b[0].size(); ++j) c[i][j] += a[i][k] * b[k][j];
  return c;
}
Rows transposed(const Rows& a) {
  Rows t(a[0].size(), std::vector<double>(a.size()));
  for (std::size_t i = 0; i < a.size(); ++i)
    for (std::size_t j = 0; j < a[0].size(); ++j) t[j][i] = a[i][j];
  return t;
}

/// Always from the left, a tall matrix transposed, as the method's authors write it.
std::vector<double> newton_schulz(const std::vector<double>& flat, std::int64_t m, std::int64_t n,
                                  int steps) {
  double squares = 0;
  for (double v : flat) squares += v * v;
  Rows x = rows_of(flat, m, n);
  if (m > n) x = transposed(x);
  for (auto& row : x)
    for (double& v : row) v /= std::sqrt(squares) + 1e-7;
  for (int s = 0; s < steps; ++s) {
    const Rows a = product(x, transposed(x)), aa = product(a, a);
    Rows b = a;
    for (std::size_t i = 0; i < a.size(); ++i)
      for (std::size_t j = 0; j < a.size(); ++j) b[i][j] = -4.7750 * a[i][j] + 2.0315 * aa[i][j];
    Rows next = product(b, x);
    for (std::size_t i = 0; i < x.size(); ++i)
      for (std::size_t j = 0; j < x[0].size(); ++j) next[i][j] += 3.4445 * x[i][j];
    x = next;
  }
  if (m > n) x = transposed(x);
  std::vector<double> out;
  for (const auto& row : x) out.insert(out.end(), row.begin(), row.end());
  return out;
}

class Muon : public OperationTest {};
INSTANTIATE_TEST_SUITE_P(Types, Muon, both_types(), type_name_of);

TEST_P(Muon, OrthogonalisesByItsIteration) {
  Workspace workspace(host_device());
  for (const auto& [m, n] : {std::pair<std::int64_t, std::int64_t>{1, 1},
                             {1, 9},
                             {9, 1},
                             {12, 12},
                             {7, 40},
                             {40, 7},
                             {33, 32}})
    for (const int steps : {1, 2, 5}) {
      Tensor x = draw.tensor({m, n}, type);
      const std::vector<double> expected = newton_schulz(elements(x), m, n, steps);
      orthogonalise(x, steps, workspace);
      EXPECT_LT(relative_error(x, expected), tolerance(type, 2e-4, 1e-11)) << m << " " << n;
    }
}

TEST_P(Muon, FiveStepsBringSingularValuesNearOne) {
  Workspace workspace(host_device());
  const std::int64_t m = 24, n = 60;
  Tensor x = draw.tensor({m, n}, type);
  orthogonalise(x, 5, workspace);
  const Rows rows = rows_of(elements(x), m, n);
  const Rows gram = product(rows, transposed(rows));
  double trace = 0;
  for (std::size_t i = 0; i < gram.size(); ++i) trace += gram[i][i];
  EXPECT_NEAR(std::sqrt(trace / m), 1, 0.25) << "root mean square of the singular values";
  Tensor nothing = Tensor::zeros({m, n}, type);
  orthogonalise(nothing, 5, workspace);
  for (double v : elements(nothing)) ASSERT_EQ(v, 0);
}

TEST_P(Muon, TenStepsFollowTheAlgorithm) {
  const std::int64_t m = 10, n = 30;
  Workspace workspace(host_device());
  for (const bool nesterov : {true, false}) {
    MuonOptions options;
    options.nesterov = nesterov;
    options.weight_decay = 0.3;
    Tensor master = draw.tensor({m * n}, type), moment = Tensor::zeros({m * n}, type),
           values = Tensor::empty({m * n}, type);
    std::vector<double> w = elements(master), mu(w.size(), 0.0);
    for (int step = 1; step <= 10; ++step) {
      Tensor gradient = draw.tensor({m * n}, type, 0.1);
      const double rate = 0.02, scale = 0.7;
      std::vector<double> u = elements(gradient);
      for (std::size_t i = 0; i < u.size(); ++i) {
        const double g = scale * u[i];
        mu[i] = 0.95 * mu[i] + g;
        u[i] = nesterov ? g + 0.95 * mu[i] : mu[i];
      }
      u = newton_schulz(u, m, n, options.steps);
      for (std::size_t i = 0; i < w.size(); ++i)
        w[i] = (1 - rate * 0.3) * w[i] - rate * 0.2 * std::sqrt(30.0) * u[i];
      muon_momentum(moment, gradient, scale, options);
      Tensor matrix = gradient.reshape({m, n});
      orthogonalise(matrix, options.steps, workspace);
      muon_update(master, gradient, rate * muon_scale(options, m, n), rate * options.weight_decay,
                  values);
      EXPECT_LT(relative_error(values, w), tolerance(type, 1e-4, 1e-11)) << step;
      EXPECT_TRUE(bit_equal(values, master));
    }
    EXPECT_LT(relative_error(moment, mu), tolerance(type, 1e-6, 1e-13));
  }
}

TEST(MuonScale, FollowsMoonlightOrTheOriginal) {
  MuonOptions options;
  EXPECT_DOUBLE_EQ(muon_scale(options, 100, 400), 0.2 * 20);
  EXPECT_DOUBLE_EQ(muon_scale(options, 400, 100), 0.2 * 20);
  options.update_rms = 0;
  EXPECT_DOUBLE_EQ(muon_scale(options, 100, 400), 1);
  EXPECT_DOUBLE_EQ(muon_scale(options, 400, 100), 2);
}

TEST_P(Muon, WhatDoesNotFitIsAnError) {
  Workspace workspace(host_device());
  Tensor a = Tensor::zeros({6}, type), b = Tensor::zeros({5}, type);
  EXPECT_THROW(muon_momentum(a, b, 1, {}), Error);
  EXPECT_THROW(muon_update(a, b, 1, 0, a), Error);
  EXPECT_THROW(orthogonalise(a, 5, workspace), Error);
}

}  // namespace
}  // namespace ballast::numeric
