// The seed of the tests' random data (tests/main.cpp): the same on every rank and in every run.
#pragma once
#include <cstdint>

namespace ballast {

/// A fixed number; BALLAST_TEST_SEED=NUMBER gives another, BALLAST_TEST_SEED=random a new one each
/// run.  Rank 0 prints it before the first test.  To be called from inside tests only.
std::uint64_t test_seed();

}  // namespace ballast
