// Element-wise passes that no operation could absorb.
#pragma once
#include "core/base/tensor.hpp"

namespace ballast {

/// out = a + b, equal shapes; out may be a or b.  Rows may lie apart.  All of one type, or bf16 is
/// b or out alone beside a type of more bits.
void add(const Tensor& a, const Tensor& b, Tensor& out);
/// Copies `from` to `to` of the same shape (rows of both may lie apart), converting the dtype (f32
/// and f64; on CUDA bf16 too).
void copy_rows(const Tensor& from, Tensor& to);

}  // namespace ballast
