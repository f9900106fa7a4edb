// Token embedding against plain fp64 loops.
#include <gtest/gtest.h>

#include "kernels/ops/embedding.hpp"
#include "tests/kernels/ops/operation_test.hpp"

namespace ballast {
namespace {

using namespace numeric;

class EmbeddingOperation : public OperationTest {};
INSTANTIATE_TEST_SUITE_P(Types, EmbeddingOperation, both_types(), type_name_of);

TEST_P(EmbeddingOperation, EmbeddingLooksUpAndAddsBack) {
  const std::int64_t t = 300, vocabulary = 7, width = 70;
  const Tensor tokens = draw.integers({t}, 0, vocabulary - 1),
               w = draw.tensor({vocabulary, width}, type), dy = draw.tensor({t, width}, type);
  Tensor y = Tensor::empty({t, width}, type), dw = draw.tensor({vocabulary, width}, type);
  std::vector<double> expected = elements(dw);
  embedding_forward(tokens, w, y);
  embedding_weight_gradient(tokens, dy, dw);
  for (std::int64_t i = 0; i < t; ++i)
    for (std::int64_t j = 0; j < width; ++j) {
      const auto id = static_cast<std::int64_t>(element(tokens, i));
      ASSERT_EQ(element(y, i * width + j), element(w, id * width + j));
      expected[static_cast<std::size_t>(id * width + j)] += element(dy, i * width + j);
    }
  EXPECT_LT(relative_error(dw, expected),
            tolerance(type, 1e-7, 1e-13));  // one rounding: sums are fp64
  for (const std::int32_t bad : {-1, 7}) {
    const Tensor wrong = from_list({0, bad});
    Tensor two = Tensor::empty({2, width}, type);
    EXPECT_THROW(embedding_forward(wrong, w, two), Error);
    EXPECT_THROW(embedding_weight_gradient(wrong, two, dw), Error);
  }
}

}  // namespace
}  // namespace ballast
