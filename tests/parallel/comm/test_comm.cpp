// Communicator: collectives against plain references, fixed order, matching order, errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <tuple>

#include "core/base/bf16.hpp"
#include "parallel/comm/messages.hpp"
#include "parallel/comm/waits.hpp"
#include "tests/parallel/support.hpp"

namespace ballast {
namespace {

using testing::SharedDraw;

class Comm : public ::testing::Test {
 protected:
  Communicator world = Communicator::world();
  const int rank = world.rank(), size = world.size();
  void TearDown() override { set_largest_message(std::int64_t{1} << 30); }
};

/// What rank r holds at i, in any type: small integers, so that sums are exact.
template <class T>
T sample(int r, std::int64_t i) {
  return static_cast<T>((r * 7 + i * 3) % 23);
}

template <class T>
Tensor filled(int r, std::int64_t n) {
  Tensor t = Tensor::empty({n}, dtype_of<T>::value);
  for (std::int64_t i = 0; i < n; ++i) t.data<T>()[i] = sample<T>(r, i);
  return t;
}

// Below and above the limit between the two algorithms, and lengths that divide nothing.
const std::int64_t kLengths[] = {0, 1, 5, 1023, 40001};

template <class T>
void check_all_reduce(const Communicator& comm) {
  for (std::int64_t n : kLengths) {
    for (Reduction reduction : {Reduction::sum, Reduction::max, Reduction::min}) {
      Tensor t = filled<T>(comm.rank(), n);
      comm.all_reduce(t, reduction);
      for (std::int64_t i = 0; i < n; ++i) {
        T expected = sample<T>(0, i);
        for (int r = 1; r < comm.size(); ++r) {
          const T x = sample<T>(r, i);
          expected = reduction == Reduction::sum   ? static_cast<T>(expected + x)
                     : reduction == Reduction::max ? std::max(expected, x)
                                                   : std::min(expected, x);
        }
        ASSERT_EQ(t.data<T>()[i], expected)
            << "n=" << n << " i=" << i << " reduction=" << static_cast<int>(reduction);
      }
    }
  }
}

TEST_F(Comm, AllReduceEveryType) {
  check_all_reduce<float>(world);
  check_all_reduce<double>(world);
  check_all_reduce<std::int32_t>(world);
  check_all_reduce<std::int64_t>(world);
  check_all_reduce<std::uint8_t>(world);
}

TEST_F(Comm, ScalarReductions) {
  EXPECT_EQ(world.all_reduce(std::int64_t{rank}), size * (size - 1) / 2);
  EXPECT_EQ(world.all_reduce(0.5 * rank, Reduction::max), 0.5 * (size - 1));
  EXPECT_EQ(world.all_reduce(-1.0 * rank, Reduction::min), -(size - 1.0));
}

TEST_F(Comm, SumsAreTakenInRankOrder) {
  SharedDraw draw(1);
  SCOPED_TRACE(draw.trace());
  for (std::int64_t n : {7, 30000}) {
    std::vector<std::vector<double>> all(size);
    for (auto& list : all) list = draw.normals(n);
    Tensor f64 = Tensor::empty({n}, DType::f64), f32 = Tensor::empty({n}, DType::f32);
    for (std::int64_t i = 0; i < n; ++i)
      f32.data<float>()[i] = static_cast<float>(f64.data<double>()[i] = all[rank][i]);
    world.all_reduce(f64);
    world.all_reduce(f32);
    for (std::int64_t i = 0; i < n; ++i) {
      double sum = all[0][i], narrow = static_cast<float>(all[0][i]);
      for (int r = 1; r < size; ++r) {
        sum += all[r][i];
        narrow += static_cast<float>(all[r][i]);
      }
      ASSERT_EQ(f64.data<double>()[i], sum) << i;
      ASSERT_EQ(f32.data<float>()[i], static_cast<float>(narrow)) << i;
    }
  }
}

TEST_F(Comm, SumsOfBf16AreRoundedOnce) {
  SharedDraw draw(3);
  SCOPED_TRACE(draw.trace());
  for (const std::int64_t n : {7, 30000}) {
    std::vector<std::vector<double>> all(static_cast<std::size_t>(size));
    for (auto& list : all) list = draw.normals(n);
    const auto bits = [&](int r, std::int64_t i) {
      return to_bf16_bits(
          static_cast<float>(all[static_cast<std::size_t>(r)][static_cast<std::size_t>(i)]));
    };
    Tensor t = Tensor::empty({n}, DType::bf16);
    for (std::int64_t i = 0; i < n; ++i) t.data<bf16>()[i].bits = bits(rank, i);
    world.all_reduce(t);
    for (std::int64_t i = 0; i < n; ++i) {
      double sum = 0;
      for (int r = 0; r < size; ++r) sum += from_bf16_bits(bits(r, i));
      ASSERT_EQ(t.data<bf16>()[i].bits, to_bf16_bits(static_cast<float>(sum))) << i;
    }
  }
}

TEST_F(Comm, ReduceScatterHasTheBitsOfAllReduce) {
  SharedDraw draw(2 + rank);
  SCOPED_TRACE(draw.trace());
  for (std::int64_t n : {1, 3, 5000}) {
    Tensor input = Tensor::empty({n * size}, DType::f32);
    for (std::int64_t i = 0; i < input.numel(); ++i)
      input.data<float>()[i] = static_cast<float>(draw.normal());
    Tensor whole = input.clone(), part = Tensor::empty({n}, DType::f32);
    world.reduce_scatter(input, part);
    world.all_reduce(whole);
    EXPECT_TRUE(testing::bit_equal(part, whole.rows(n * rank, n * (rank + 1))));
    Tensor own = input.rows(n * rank, n * (rank + 1));  // in place
    world.reduce_scatter(input, own);
    EXPECT_TRUE(testing::bit_equal(own, part));
    world.all_gather(own, input);
    EXPECT_TRUE(testing::bit_equal(input, whole));
  }
}

TEST_F(Comm, ReductionLongerThanItsScratch) {
  // More than 32 MiB of receive space: several rounds.
  const std::int64_t n = 9 * (std::int64_t{1} << 20) / size;
  Tensor input = Tensor::empty({n * size}, DType::f32), part = Tensor::empty({n}, DType::f32);
  for (std::int64_t i = 0; i < n * size; ++i)
    input.data<float>()[i] = static_cast<float>((i + rank) % 1000);
  world.reduce_scatter(input, part);
  for (std::int64_t i = 0; i < n; i += 997) {
    float expected = 0;
    for (int r = 0; r < size; ++r) expected += static_cast<float>((n * rank + i + r) % 1000);
    ASSERT_EQ(part.data<float>()[i], expected) << i;
  }
}

// Several in flight at once, more than there is receive space for; computation goes on between.
TEST_F(Comm, CollectivesBesideHaveTheBitsOfThoseThatWait) {
  SharedDraw draw(4711);
  const Communicator own = world.split(0, rank);
  constexpr int kFlights = 6;
  for (const std::int64_t largest : {std::int64_t{50}, (std::int64_t{96} << 20) / 8 / kFlights}) {
    std::vector<Tensor> inputs, sums, whole, parts, gathered;
    for (int f = 0; f < kFlights; ++f) {
      const std::int64_t n = draw.integer(largest / 2, largest) / size;
      Tensor input = Tensor::empty({n * size}, f % 2 == 0 ? DType::f64 : DType::f32);
      dispatch_float(input.dtype(), [&](auto t) {
        for (std::int64_t i = 0; i < n * size; ++i)
          input.data<decltype(t)>()[i] = static_cast<decltype(t)>(
              random_normal(test_seed(), static_cast<std::uint64_t>(rank * kFlights + f),
                            static_cast<std::uint64_t>(i)));
      });
      inputs.push_back(input);
      whole.push_back(input.clone());
      world.all_reduce(whole.back());
      sums.push_back(input.clone());
      parts.push_back(Tensor::zeros({n}, input.dtype()));
      gathered.push_back(Tensor::zeros({n * size}, input.dtype()));
    }
    std::vector<Pending> flights;
    for (int f = 0; f < kFlights; ++f) flights.push_back(own.all_reduce_beside(sums[f]));
    for (Pending& flight : flights) flight.complete();
    flights.clear();
    for (int f = 0; f < kFlights; ++f)
      flights.push_back(own.reduce_scatter_beside(inputs[f], parts[f]));
    for (Pending& flight : flights) flight.complete();
    flights.clear();
    for (int f = 0; f < kFlights; ++f)
      flights.push_back(own.all_gather_beside(parts[f], gathered[f]));
    for (Pending& flight : flights) flight.complete();
    for (int f = 0; f < kFlights; ++f) {
      const std::int64_t n = parts[f].numel();
      EXPECT_TRUE(testing::bit_equal(sums[f], whole[f])) << f;
      EXPECT_TRUE(testing::bit_equal(parts[f], whole[f].rows(n * rank, n * (rank + 1)).clone()))
          << f;
      EXPECT_TRUE(testing::bit_equal(gathered[f], whole[f])) << f;
    }
  }
}

TEST_F(Comm, AllGather) {
  for (std::int64_t n : kLengths) {
    Tensor all = Tensor::empty({size, n}, DType::i64);
    world.all_gather(filled<std::int64_t>(rank, n), all);
    for (int r = 0; r < size; ++r)
      for (std::int64_t i = 0; i < n; ++i)
        ASSERT_EQ(all.data<std::int64_t>()[r * n + i], sample<std::int64_t>(r, i));
  }
}

TEST_F(Comm, AllToAll) {
  for (std::int64_t n : {0, 1, 3, 9001}) {
    Tensor input = Tensor::empty({size, n}, DType::i32),
           output = Tensor::empty({size, n}, DType::i32);
    for (int p = 0; p < size; ++p)
      for (std::int64_t i = 0; i < n; ++i)
        input.data<std::int32_t>()[p * n + i] =
            static_cast<std::int32_t>(1000000 * rank + 10000 * p + i);
    world.all_to_all(input, output);
    for (int p = 0; p < size; ++p)
      for (std::int64_t i = 0; i < n; ++i)
        ASSERT_EQ(output.data<std::int32_t>()[p * n + i], 1000000 * p + 10000 * rank + i);
  }
}

TEST_F(Comm, BroadcastFromEveryRoot) {
  for (int root = 0; root < size; ++root) {
    Tensor t = filled<float>(rank, 777);
    world.broadcast(t, root);
    EXPECT_TRUE(testing::bit_equal(t, filled<float>(root, 777)));
    const std::string long_text(static_cast<std::size_t>(1000 * root), 'x');
    EXPECT_EQ(world.broadcast(rank == root ? long_text : "other", root), long_text);
  }
}

TEST_F(Comm, TextsOfDifferentLengths) {
  // Long enough for both ways of gathering; one is empty; bytes of any value.
  for (std::size_t scale : {1u, 5000u}) {
    const auto text_of = [&](int r) {
      return std::string(static_cast<std::size_t>(r) * scale,
                         static_cast<char>(r == 1 ? 0 : 'a' + r));
    };
    const auto texts = world.all_gather(text_of(rank));
    ASSERT_EQ(static_cast<int>(texts.size()), size);
    for (int r = 0; r < size; ++r) EXPECT_EQ(texts[r], text_of(r));
  }
}

TEST_F(Comm, LongMessagesTravelInParts) {
  set_largest_message(1000);
  check_all_reduce<double>(world);
  const std::int64_t n = 4321;
  Tensor sent = filled<float>(rank, n), received = Tensor::empty({n}, DType::f32),
         all = Tensor::empty({size, n}, DType::f32);
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  const Transfer ring[] = {{sent, next, true}, {received, previous, false}};
  world.exchange(ring).complete();
  EXPECT_TRUE(testing::bit_equal(received, filled<float>(previous, n)));
  world.all_gather(sent, all);
  EXPECT_TRUE(
      testing::bit_equal(all.rows(size - 1, size).reshape({n}), filled<float>(size - 1, n)));
  Tensor t = filled<float>(rank, n);
  world.broadcast(t, size - 1);
  EXPECT_TRUE(testing::bit_equal(t, filled<float>(size - 1, n)));
}

TEST_F(Comm, TransfersBetweenTwoRanksMatchInTheOrderGiven) {
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  // Two exchanges in flight, two transfers each, of different lengths (one empty): lengths and
  // values tell a mismatch.
  std::vector<Tensor> sent, received;
  std::vector<Pending> pending;
  for (int e = 0; e < 2; ++e) {
    std::vector<Transfer> transfers;
    for (int k = 0; k < 3; ++k) {
      const std::int64_t n = k == 1 ? 0 : 10 + 5 * e + k;
      sent.push_back(filled<float>(100 * rank + 10 * e + k, n));
      received.push_back(Tensor::empty({n}, DType::f32));
      transfers.push_back({sent.back(), next, true});
      transfers.push_back({received.back(), previous, false});
    }
    pending.push_back(world.exchange(transfers));
    EXPECT_TRUE(pending.back().active());
  }
  // A collective call in between does not take their messages.
  EXPECT_EQ(world.all_reduce(1.0), size);
  for (auto& p : pending) {
    p.complete();
    EXPECT_FALSE(p.active());
    p.complete();  // a second time does nothing
  }
  for (int e = 0; e < 2; ++e)
    for (int k = 0; k < 3; ++k) {
      const Tensor& got = received[3 * e + k];
      EXPECT_TRUE(testing::bit_equal(got, filled<float>(100 * previous + 10 * e + k, got.numel())))
          << e << " " << k;
    }
}

TEST_F(Comm, ChannelsMatchApart) {
  // One order at the sender, the other at the receiver: only the channel can tell which message is
  // which.
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  constexpr std::int64_t n = 301;
  const Tensor first = filled<float>(rank, n), second = filled<float>(rank + 5, n);
  Tensor from_first = Tensor::zeros({n}, DType::f32), from_second = Tensor::zeros({n}, DType::f32);
  const auto one = [&](const Tensor& t, int peer, bool send, int channel) {
    const Transfer transfer[] = {{t, peer, send}};
    return world.exchange(transfer, channel);
  };
  Pending pending[] = {one(first, next, true, 0), one(second, next, true, 1),
                       one(from_second, previous, false, 1), one(from_first, previous, false, 0)};
  for (Pending& p : pending) p.complete();
  EXPECT_TRUE(testing::bit_equal(from_first, filled<float>(previous, n)));
  EXPECT_TRUE(testing::bit_equal(from_second, filled<float>(previous + 5, n)));
  EXPECT_THROW(one(first, rank, true, -1), Error);
}

TEST_F(Comm, PendingCompletesWhenItGoes) {
  Tensor sent = filled<double>(rank, 50000), received = Tensor::zeros({50000}, DType::f64);
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  {
    const Transfer ring[] = {{received, previous, false}, {sent, next, true}};
    Pending pending = world.exchange(ring);
    Pending moved = std::move(pending);
    EXPECT_FALSE(pending.active());
    EXPECT_TRUE(moved.active());
  }
  EXPECT_TRUE(testing::bit_equal(received, filled<double>(previous, 50000)));
  EXPECT_FALSE(world.exchange({}).active());
}

TEST_F(Comm, WrongLengthIsNoticed) {
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  for (std::int64_t wrong : {3, 5}) {
    Tensor sent = filled<float>(rank, 4), received = Tensor::empty({wrong}, DType::f32);
    const Transfer ring[] = {{received, previous, false}, {sent, next, true}};
    if (wrong > 4) {
      EXPECT_THROW(world.exchange(ring).complete(), Error);  // fewer bytes came
    } else if (size > 1) {
      EXPECT_THROW(world.exchange(ring).complete(),
                   Error);  // more bytes came than fit: MPI says so
    }
    world.barrier();
  }
}

TEST_F(Comm, NanReachesEveryRank) {
  for (int bad = 0; bad < size; ++bad) {
    const double value = rank == bad ? std::numeric_limits<double>::quiet_NaN() : rank;
    for (Reduction reduction : {Reduction::sum, Reduction::max, Reduction::min})
      EXPECT_TRUE(std::isnan(world.all_reduce(value, reduction)));
  }
}

TEST_F(Comm, SplitOrdersByKey) {
  const Communicator half = world.split(rank % 2, -rank);
  EXPECT_EQ(half.size(), (size + 1 - rank % 2) / 2);
  // Highest world rank first.
  std::vector<int> members;
  for (int r = size - 1; r >= 0; --r)
    if (r % 2 == rank % 2) members.push_back(r);
  EXPECT_EQ(members[half.rank()], rank);
  EXPECT_EQ(half.all_reduce(std::int64_t{rank}),
            std::accumulate(members.begin(), members.end(), std::int64_t{0}));
  EXPECT_THROW(world.split(-1, 0), Error);
  const Communicator machine = world.split_by_machine();
  EXPECT_GE(machine.size(), 1);
  EXPECT_LE(machine.size(), size);
}

// A group that was split before is copied: the ranks must be those of these colors and keys, and
// the copies must not take each other's messages.
TEST_F(Comm, GroupsSplitAgainAreTheirColorsAndKeysAndApart) {
  SharedDraw draws(83);
  SCOPED_TRACE(draws.trace());
  for (int trial = 0; trial < 24; ++trial) {
    std::vector<std::tuple<std::int64_t, std::int64_t, int>> given;  // color, key, rank
    for (int r = 0; r < size; ++r)
      given.emplace_back(draws.integer(0, trial % 3), draws.integer(0, 1), r);
    const auto [color, key, self] = given[static_cast<std::size_t>(rank)];
    std::sort(given.begin(), given.end());
    std::vector<int> members;
    for (const auto& [of, at, r] : given)
      if (of == color) members.push_back(r);
    const Communicator a = world.split(static_cast<int>(color), static_cast<int>(key)),
                       b = world.split(static_cast<int>(color) + 7, static_cast<int>(key) - 3);
    for (const Communicator& group : {a, b}) {
      ASSERT_EQ(group.size(), static_cast<int>(members.size()));
      ASSERT_EQ(members[static_cast<std::size_t>(group.rank())], rank);
    }
    const int next = (a.rank() + 1) % a.size(), before = (a.rank() + a.size() - 1) % a.size();
    double sent[] = {rank + 0.25, rank + 0.5}, came[] = {0, 0};
    const auto one = [](double& x) { return Tensor::wrap(&x, {1}, DType::f64); };
    const std::vector<Transfer> from_a{{one(came[0]), before, false}, {one(sent[0]), next, true}},
        from_b{{one(came[1]), before, false}, {one(sent[1]), next, true}};
    // In another order on every other rank.
    Pending first = rank % 2 ? a.exchange(from_a) : b.exchange(from_b),
            second = rank % 2 ? b.exchange(from_b) : a.exchange(from_a);
    first.complete(), second.complete();
    EXPECT_EQ(came[0], members[static_cast<std::size_t>(before)] + 0.25);
    EXPECT_EQ(came[1], members[static_cast<std::size_t>(before)] + 0.5);
  }
}

TEST_F(Comm, GroupOfOneNeedsNobody) {
  const Communicator alone;
  EXPECT_EQ(alone.size(), 1);
  EXPECT_EQ(alone.all_reduce(3.5), 3.5);
  Tensor t = filled<float>(4, 9), out = Tensor::empty({9}, DType::f32);
  alone.reduce_scatter(t, out);
  EXPECT_TRUE(testing::bit_equal(t, out));
  alone.all_to_all(t, out);
  alone.all_gather(t, out);
  EXPECT_TRUE(testing::bit_equal(t, out));
  EXPECT_EQ(alone.all_gather(std::string("a")), std::vector<std::string>{"a"});
  EXPECT_EQ(alone.broadcast(std::string("b"), 0), "b");
}

TEST_F(Comm, CheckAllThrowsTheLowestRanksMessageEverywhere) {
  EXPECT_NO_THROW(check_all(world, true, "unused"));
  for (int first = 0; first < size; ++first) {
    std::string message;
    try {
      check_all(world, rank < first, fmt::format("message of rank {}", rank));
    } catch (const CollectiveError& e) {
      message = e.what();
    }
    EXPECT_EQ(message, fmt::format("message of rank {}", first));
  }
}

TEST_F(Comm, MistakesAreErrors) {
  Tensor wide = Tensor::zeros({4, 4}, DType::f32),
         odd = Tensor::zeros({static_cast<std::int64_t>(size) * 3 + 1}, DType::f32),
         three = Tensor::zeros({3}, DType::f32);
  Tensor columns = wide.narrow(1, 0, 2);
  EXPECT_THROW(world.all_reduce(columns), Error);
  EXPECT_THROW(world.reduce_scatter(odd, three), Error);
  EXPECT_THROW(world.all_gather(three, odd), Error);
  EXPECT_THROW(world.broadcast(three, size), Error);
  const Transfer outside[] = {{three, size, true}};
  EXPECT_THROW(world.exchange(outside), Error);
  EXPECT_THROW(check_mpi(MPI_ERR_RANK, "a call"), Error);
#ifndef BALLAST_HAVE_NCCL
  float memory = 0;
  Tensor device = Tensor::wrap(&memory, {1}, DType::f32, Space::cuda);
  try {
    world.all_reduce(device);
    FAIL() << "a device tensor was accepted";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("without NCCL"), std::string::npos) << e.what();
  }
#endif
}

}  // namespace
}  // namespace ballast
