#include "parallel/comm/comm.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "core/base/number.hpp"
#include "core/base/reduction_space.hpp"
#include "parallel/comm/library_watch.hpp"
#include "parallel/comm/messages.hpp"
#include "parallel/comm/waits.hpp"

#ifdef BALLAST_HAVE_NCCL
#include "parallel/comm/nccl_group.hpp"
#endif

namespace ballast {
namespace {

constexpr int kCollectiveTag = 1, kBesideTag = 3;
constexpr int exchange_tag(int channel) { return 2 * channel; }
constexpr std::size_t kScratchBytes = kReductionBytes, kSmallBytes = kGatheredBytes;

void require_dense(const Tensor& t, const char* call) {
  require(t.contiguous(), "{} needs contiguous tensors, got shape {}", call, to_string(t.shape()));
}

/// out[i] = parts[0][i] (+) parts[1][i] (+) ..., always in this order.  Floating-point sums run in
/// fp64 and round once, so they depend on the values and the number of parts alone.  `out` may be
/// one of the parts.  A sum of bf16 becomes fp32, then bf16.
template <class T>
void combine(const std::vector<const T*>& parts, std::int64_t n, Reduction reduction, T* out) {
  constexpr bool kFloats = std::is_floating_point_v<T> || std::is_same_v<T, bf16>;
  using Sum = std::conditional_t<kFloats, double, T>;
  const auto term = [](T x) { return static_cast<Sum>(number(x)); };
  constexpr std::int64_t kSpan = 1024;
  Sum sum[kSpan];
  for (std::int64_t begin = 0; begin < n; begin += kSpan) {
    const std::int64_t count = std::min(kSpan, n - begin);
    for (std::int64_t i = 0; i < count; ++i) sum[i] = term(parts[0][begin + i]);
    for (std::size_t p = 1; p < parts.size(); ++p) {
      const T* x = parts[p] + begin;
      // Comparisons are written so that a NaN wins from either side.
      const auto join = [&](const auto& chosen) {
        for (std::int64_t i = 0; i < count; ++i) {
          const Sum next = term(x[i]);
          sum[i] = chosen(sum[i], next) || sum[i] != sum[i] ? sum[i] : next;
        }
      };
      switch (reduction) {
        case Reduction::sum:
          for (std::int64_t i = 0; i < count; ++i) sum[i] = static_cast<Sum>(sum[i] + term(x[i]));
          break;
        case Reduction::max:
          join([](Sum a, Sum b) { return a >= b; });
          break;
        case Reduction::min:
          join([](Sum a, Sum b) { return a <= b; });
          break;
      }
    }
    for (std::int64_t i = 0; i < count; ++i) out[begin + i] = element_of<T>(sum[i]);
  }
}

template <class F>
void dispatch_number(DType type, F&& f) {
  switch (type) {
    case DType::f32:
      return f(float{});
    case DType::f64:
      return f(double{});
    case DType::i32:
      return f(std::int32_t{});
    case DType::i64:
      return f(std::int64_t{});
    case DType::u8:
      return f(std::uint8_t{});
    case DType::bf16:
      return f(bf16{});
  }
  fail("host tensors of {} cannot be reduced", name(type));
}

/// The ranks of every group in its order, a -1 after each, groups by their lowest rank: what groups
/// that MPI_Comm_split makes of colors and keys, by rank, have in common with no others.
std::vector<int> ranks_by_group(const std::vector<std::array<int, 2>>& given) {
  std::map<int, std::vector<std::pair<int, int>>> by_color;  // (key, rank)
  std::vector<int> colors;                                   // in the order of their lowest ranks
  for (std::size_t r = 0; r < given.size(); ++r) {
    auto& group = by_color[given[r][0]];
    if (group.empty()) colors.push_back(given[r][0]);
    group.emplace_back(given[r][1], static_cast<int>(r));
  }
  std::vector<int> order;
  for (const int color : colors) {
    auto& group = by_color[color];
    std::sort(group.begin(), group.end());
    for (const auto& [key, rank] : group) order.push_back(rank);
    order.push_back(-1);
  }
  return order;
}

}  // namespace

struct Communicator::State {
  MPI_Comm comm = MPI_COMM_SELF;
  bool owned = false;
  int rank = 0, size = 1;
  std::shared_ptr<State> machine;  ///< ranks that share memory with this one, once asked for
  std::map<std::vector<int>, MPI_Comm> parts;  ///< made by split(), by ranks_by_group
  Tensor scratch;                              ///< [bytes] u8, receive space of host reductions
  std::size_t received_bytes = 0;              ///< receive space of host reductions in flight
#ifdef BALLAST_HAVE_NCCL
  std::map<int, NcclGroup> nccl;  ///< by channel, each made by the first call with a device tensor;
                                  ///< collectives use channel 0
  NcclGroup& device(int channel = 0) { return nccl.try_emplace(channel, comm).first->second; }
#endif

  State() = default;
  State(MPI_Comm comm_, bool owned_) : comm(comm_), owned(owned_) {
    check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check_mpi(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  }
  State(const State&) = delete;
  ~State() {
    int finalised = 0;
    MPI_Finalized(&finalised);
    if (finalised) return;
    for (auto& [ranks, part] : parts)
      if (part != MPI_COMM_NULL) MPI_Comm_free(&part);
    if (owned) MPI_Comm_free(&comm);
  }

  void wait(MPI_Request request) const {
    std::vector<MPI_Request> requests{request};
    wait_all(requests);
  }
  std::byte* scratch_bytes(std::size_t bytes) {
    if (!scratch.defined() || scratch.bytes() < bytes) {
      scratch = Tensor();  // frees before it allocates
      scratch = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::u8, host_device(),
                              MemoryCategory::communication);
    }
    return static_cast<std::byte*>(scratch.raw());
  }
  /// data holds `size` blocks, this rank's in its place; fills in the others.
  void gather_blocks(void* data, std::size_t block_bytes) const {
    if (size == 1 || block_bytes == 0) return;
    if (block_bytes * size <= kSmallBytes) {
      MPI_Request request;
      check_mpi(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data,
                               static_cast<int>(block_bytes), MPI_BYTE, comm, &request),
                "MPI_Iallgather");
      return wait(request);
    }
    auto* blocks = static_cast<char*>(data);
    Messages messages(comm, kCollectiveTag);
    for (int i = 1; i < size; ++i)
      messages.receive(blocks + block_bytes * ((rank + size - i) % size), block_bytes,
                       (rank + size - i) % size);
    for (int i = 1; i < size; ++i)
      messages.send(blocks + block_bytes * rank, block_bytes, (rank + i) % size);
    messages.wait();
  }
  /// Every rank's `send_block(p)` goes to rank p and is reduced there in rank order into `out` [n];
  /// the blocks of a rank may have any lengths, `n` is this rank's, `length(p)` that of rank p.
  /// `out` may be this rank's own block.
  template <class T, class Block, class Length>
  void reduce_blocks(const Block& send_block, const Length& length, Reduction reduction, T* out) {
    const std::int64_t span =
        std::max<std::int64_t>(1, static_cast<std::int64_t>(kScratchBytes / sizeof(T)) / size);
    std::int64_t longest = 0;
    for (int p = 0; p < size; ++p) longest = std::max(longest, length(p));
    T* received = reinterpret_cast<T*>(
        scratch_bytes(sizeof(T) * static_cast<std::size_t>(std::min(span, length(rank)) * size)));
    for (std::int64_t begin = 0; begin < longest; begin += span) {
      const auto count = [&](int p) {
        return std::clamp<std::int64_t>(length(p) - begin, 0, span);
      };
      const std::int64_t mine = count(rank);
      Messages messages(comm, kCollectiveTag);
      std::vector<const T*> parts(size);
      for (int i = 0; i < size; ++i) {
        const int p = (rank + size - i) % size;
        parts[p] = p == rank ? send_block(p) + begin : received + mine * p;
        if (p != rank)
          messages.receive(received + mine * p, sizeof(T) * static_cast<std::size_t>(mine), p);
      }
      for (int i = 1; i < size; ++i) {
        const int p = (rank + i) % size;
        messages.send(send_block(p) + begin, sizeof(T) * static_cast<std::size_t>(count(p)), p);
      }
      messages.wait();
      combine(parts, mine, reduction, out + begin);
    }
  }
};

#ifdef BALLAST_HAVE_NCCL
#define BALLAST_BY_NCCL(tensor, call, ...) \
  if ((tensor).space() == Space::cuda) return state_->device(__VA_ARGS__).call
#else
#define BALLAST_BY_NCCL(tensor, call, ...)                                                         \
  if ((tensor).space() == Space::cuda)                                                             \
  fail(                                                                                            \
      "{}: the tensor lies on a GPU, but this program was built without NCCL; rebuild where CUDA " \
      "and NCCL are found or use run.backend = "                                                   \
      "\"host\"",                                                                                  \
      __func__)
#endif

Communicator::Communicator() : state_(std::make_shared<State>()) {}
Communicator::Communicator(MPI_Comm comm, bool owned)
    : state_(std::make_shared<State>(comm, owned)) {}

Communicator Communicator::world() {
  // One state for all handles, so that there is one NCCL group; it goes with the last handle,
  // before MPI does.
  static std::weak_ptr<State> shared;
  Communicator comm;
  comm.state_ = shared.lock();
  if (!comm.state_) {
    int initialised = 0;
    MPI_Initialized(&initialised);
    require(initialised, "MPI is not initialised: call MPI_Init before Communicator::world()");
    shared = comm.state_ = std::make_shared<State>(MPI_COMM_WORLD, false);
  }
  return comm;
}

int Communicator::rank() const { return state_->rank; }
int Communicator::size() const { return state_->size; }
MPI_Comm Communicator::mpi() const { return state_->comm; }

Communicator Communicator::split(int color, int key) const {
  require(color >= 0, "a sub-group's color must not be negative, got {}", color);
  std::vector<std::array<int, 2>> given(static_cast<std::size_t>(size()));
  given[static_cast<std::size_t>(rank())] = {color, key};
  state_->gather_blocks(given.data(), sizeof given.front());
  const std::vector<int> order = ranks_by_group(given);
  // MPI_Comm_split has no form that yields: with ranks that share cores it takes up to a tenth of a
  // second.  So the same groups are split once and then copied; and all ranks are here before it
  // polls.
  const bool whole = std::is_sorted(order.begin(), order.end() - 1);
  MPI_Comm& kept =
      whole ? state_->comm : state_->parts.try_emplace(order, MPI_COMM_NULL).first->second;
  if (kept == MPI_COMM_NULL) {
    const CallWatch watch("MPI_Comm_split");
    check_mpi(MPI_Comm_split(state_->comm, color, key, &kept), "MPI_Comm_split");
  }
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Comm_idup(kept, &part, &request), "MPI_Comm_idup");
  state_->wait(request);
  return Communicator(part, true);
}

Communicator Communicator::split_by_machine() const {
  Communicator result;
  if (!state_->machine) {
    barrier();
    MPI_Comm part = MPI_COMM_NULL;
    const CallWatch watch("MPI_Comm_split_type");
    check_mpi(MPI_Comm_split_type(state_->comm, MPI_COMM_TYPE_SHARED, rank(), MPI_INFO_NULL, &part),
              "MPI_Comm_split_type");
    state_->machine = std::make_shared<State>(part, true);
  }
  result.state_ = state_->machine;
  return result;
}

Pending Communicator::exchange(std::span<const Transfer> transfers, int channel) const {
  require(channel >= 0 && channel < 64, "exchange: channel {} lies outside [0, 64)", channel);
  if (transfers.empty()) return {};
  for (const Transfer& t : transfers) {
    require_dense(t.tensor, "exchange");
    require(t.tensor.space() == transfers[0].tensor.space(),
            "exchange: tensors of one call must lie in one memory space");
    require(t.peer >= 0 && t.peer < size(), "exchange: rank {} lies outside a group of {}", t.peer,
            size());
  }
  BALLAST_BY_NCCL(transfers[0].tensor, exchange(transfers), channel);
  struct Flight {
    Messages messages;
    std::vector<Tensor> alive;
  };
  auto flight = std::make_shared<Flight>(Flight{Messages(state_->comm, exchange_tag(channel)), {}});
  // Receives first: a message that finds its receive posted needs no copy.
  for (const Transfer& t : transfers) {
    flight->alive.push_back(t.tensor);
    if (!t.send) flight->messages.receive(t.tensor.raw(), t.tensor.bytes(), t.peer);
  }
  for (const Transfer& t : transfers)
    if (t.send) flight->messages.send(t.tensor.raw(), t.tensor.bytes(), t.peer);
  return Pending([flight, state = state_] { flight->messages.wait(); },
                 [flight] { return flight->messages.arrived(); });
}

void Communicator::set_up(Device& device) const {
  Tensor token = Tensor::zeros({1}, DType::f32, device, MemoryCategory::communication);
  all_reduce(token);
}

void Communicator::all_reduce(Tensor& tensor, Reduction reduction) const {
  require_dense(tensor, "all_reduce");
  BALLAST_BY_NCCL(tensor, all_reduce(tensor, reduction));
  State& s = *state_;
  const std::int64_t n = tensor.numel();
  dispatch_number(tensor.dtype(), [&](auto type) {
    using T = decltype(type);
    T* data = tensor.data<T>();
    if (s.size == 1 || n == 0) return;
    const std::size_t bytes = sizeof(T) * static_cast<std::size_t>(n);
    if (bytes * s.size <= kSmallBytes) {
      T* all = reinterpret_cast<T*>(s.scratch_bytes(bytes * s.size));
      std::memcpy(all + n * s.rank, data, bytes);
      s.gather_blocks(all, bytes);
      std::vector<const T*> parts(s.size);
      for (int p = 0; p < s.size; ++p) parts[p] = all + n * p;
      return combine(parts, n, reduction, data);
    }
    // Each rank reduces one block; the last block may be shorter, or empty.
    const std::int64_t block = (n + s.size - 1) / s.size;
    const auto begin = [&](int p) { return std::min(n, block * p); };
    const auto length = [&](int p) { return begin(p + 1) - begin(p); };
    s.reduce_blocks<T>([&](int p) { return data + begin(p); }, length, reduction,
                       data + begin(s.rank));
    Messages messages(s.comm, kCollectiveTag);
    for (int i = 1; i < s.size; ++i) {
      const int p = (s.rank + s.size - i) % s.size;
      messages.receive(data + begin(p), sizeof(T) * static_cast<std::size_t>(length(p)), p);
    }
    for (int i = 1; i < s.size; ++i)
      messages.send(data + begin(s.rank), sizeof(T) * static_cast<std::size_t>(length(s.rank)),
                    (s.rank + i) % s.size);
    messages.wait();
  });
}

void Communicator::all_reduce(std::span<double> values, Reduction reduction) const {
  Tensor t = Tensor::wrap(values.data(), {std::ssize(values)}, DType::f64);
  all_reduce(t, reduction);
}

double Communicator::all_reduce(double value, Reduction reduction) const {
  Tensor t = Tensor::wrap(&value, {1}, DType::f64);
  all_reduce(t, reduction);
  return value;
}

std::int64_t Communicator::all_reduce(std::int64_t value, Reduction reduction) const {
  Tensor t = Tensor::wrap(&value, {1}, DType::i64);
  all_reduce(t, reduction);
  return value;
}

void Communicator::reduce_scatter(const Tensor& input, Tensor& output) const {
  require_dense(input, "reduce_scatter");
  require_dense(output, "reduce_scatter");
  require(input.numel() == output.numel() * size() && input.dtype() == output.dtype() &&
              input.space() == output.space(),
          "reduce_scatter over {} ranks: {} {} does not fit {} {}", size(), name(input.dtype()),
          to_string(input.shape()), name(output.dtype()), to_string(output.shape()));
  BALLAST_BY_NCCL(input, reduce_scatter(input, output));
  const std::int64_t n = output.numel();
  dispatch_number(input.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* data = input.data<T>();
    if (n > 0)
      state_->reduce_blocks<T>([&](int p) { return data + n * p; }, [n](int) { return n; },
                               Reduction::sum, output.data<T>());
  });
}

void Communicator::all_gather(const Tensor& input, Tensor& output) const {
  require_dense(input, "all_gather");
  require_dense(output, "all_gather");
  require(output.numel() == input.numel() * size() && input.dtype() == output.dtype() &&
              input.space() == output.space(),
          "all_gather over {} ranks: {} {} does not fit {} {}", size(), name(input.dtype()),
          to_string(input.shape()), name(output.dtype()), to_string(output.shape()));
  BALLAST_BY_NCCL(input, all_gather(input, output));
  if (input.bytes() == 0) return;
  auto* own = static_cast<char*>(output.raw()) + input.bytes() * rank();
  if (own != input.raw()) std::memcpy(own, input.raw(), input.bytes());
  state_->gather_blocks(output.raw(), input.bytes());
}

namespace {

/// A host reduction in flight.
struct ReductionFlight {
  Messages messages;
  Tensor input, output, received;
};

}  // namespace

Pending Communicator::start_reduction(const Tensor& input, const Tensor& output, bool all) const {
  const std::int64_t n = output.numel();
  const std::size_t bytes = output.bytes(), ranks = static_cast<std::size_t>(size());
  if (bytes == 0 || size() == 1) {
    if (bytes > 0 && output.raw() != input.raw())
      std::memmove(output.raw(), input.raw(), output.bytes());
    return {};
  }
  auto flight = std::make_shared<ReductionFlight>(
      ReductionFlight{Messages(state_->comm, kBesideTag), input, output, {}});
  // The same on all ranks, which is how the messages of several reductions find one another.
  const bool starts = state_->received_bytes + bytes * ranks <= kScratchBytes;
  if (starts) {
    state_->received_bytes += bytes * ranks;
    flight->received = Tensor::empty({static_cast<std::int64_t>(bytes * ranks)}, DType::u8,
                                     host_device(), MemoryCategory::communication);
    auto* to = static_cast<std::byte*>(flight->received.raw());
    const auto* from = static_cast<const std::byte*>(input.raw());
    for (int i = 1; i < size(); ++i) {
      const int p = (rank() + size() - i) % size();
      flight->messages.receive(to + bytes * static_cast<std::size_t>(p), bytes, p);
    }
    for (int i = 1; i < size(); ++i) {
      const int p = (rank() + i) % size();
      flight->messages.send(from + bytes * static_cast<std::size_t>(p), bytes, p);
    }
  }
  const auto complete = [flight, n, starts, all, bytes, ranks, state = state_] {
    dispatch_number(flight->input.dtype(), [&](auto type) {
      using T = decltype(type);
      const T* data = flight->input.data<T>();
      T* sum = flight->output.data<T>();
      if (!starts) {
        state->reduce_blocks<T>([&](int p) { return data + n * p; }, [n](int) { return n; },
                                Reduction::sum, sum);
      } else {
        flight->messages.wait();
        std::vector<const T*> parts(ranks);
        for (std::size_t p = 0; p < ranks; ++p)
          parts[p] = (static_cast<int>(p) == state->rank
                          ? data
                          : reinterpret_cast<const T*>(flight->received.raw())) +
                     n * static_cast<std::int64_t>(p);
        combine(parts, n, Reduction::sum, sum);
      }
    });
    if (starts) state->received_bytes -= bytes * ranks;
    flight->received = {};
    if (all) state->gather_blocks(flight->input.raw(), bytes);
  };
  return Pending(complete,
                 [flight, starts, all] { return starts && !all && flight->messages.arrived(); });
}

Pending Communicator::all_reduce_beside(Tensor& tensor) const {
  require_dense(tensor, "all_reduce_beside");
  require(tensor.numel() % size() == 0, "all_reduce_beside: {} elements over {} ranks",
          tensor.numel(), size());
  BALLAST_BY_NCCL(tensor, all_reduce_beside(tensor));
  const std::int64_t n = tensor.numel() / size();
  return start_reduction(tensor,
                         tensor.reshape({tensor.numel()}).rows(n * rank(), n * (rank() + 1)), true);
}

Pending Communicator::reduce_scatter_beside(const Tensor& input, Tensor& output) const {
  require_dense(input, "reduce_scatter_beside");
  require_dense(output, "reduce_scatter_beside");
  require(input.numel() == output.numel() * size() && input.dtype() == output.dtype() &&
              input.space() == output.space(),
          "reduce_scatter_beside over {} ranks: {} {} does not fit {} {}", size(),
          name(input.dtype()), to_string(input.shape()), name(output.dtype()),
          to_string(output.shape()));
  BALLAST_BY_NCCL(input, reduce_scatter_beside(input, output));
  return start_reduction(input, output, false);
}

Pending Communicator::all_gather_beside(const Tensor& input, Tensor& output) const {
  require_dense(input, "all_gather_beside");
  require_dense(output, "all_gather_beside");
  require(output.numel() == input.numel() * size() && input.dtype() == output.dtype() &&
              input.space() == output.space(),
          "all_gather_beside over {} ranks: {} {} does not fit {} {}", size(), name(input.dtype()),
          to_string(input.shape()), name(output.dtype()), to_string(output.shape()));
  BALLAST_BY_NCCL(input, all_gather_beside(input, output));
  auto* own = static_cast<std::byte*>(output.raw()) + input.bytes() * static_cast<unsigned>(rank());
  if (input.bytes() > 0 && own != input.raw()) std::memcpy(own, input.raw(), input.bytes());
  if (input.bytes() == 0 || size() == 1) return {};
  struct Flight {
    Messages messages;
    Tensor output;
  };
  auto flight = std::make_shared<Flight>(Flight{Messages(state_->comm, kBesideTag), output});
  auto* blocks = static_cast<std::byte*>(output.raw());
  for (int i = 1; i < size(); ++i) {
    const int p = (rank() + size() - i) % size();
    flight->messages.receive(blocks + input.bytes() * static_cast<unsigned>(p), input.bytes(), p);
  }
  for (int i = 1; i < size(); ++i) flight->messages.send(own, input.bytes(), (rank() + i) % size());
  return Pending([flight, state = state_] { flight->messages.wait(); },
                 [flight] { return flight->messages.arrived(); });
}

void Communicator::all_to_all(const Tensor& input, Tensor& output) const {
  require_dense(input, "all_to_all");
  require_dense(output, "all_to_all");
  require(input.numel() == output.numel() && input.numel() % size() == 0 &&
              input.dtype() == output.dtype() && input.space() == output.space(),
          "all_to_all over {} ranks: {} {} does not fit {} {}", size(), name(input.dtype()),
          to_string(input.shape()), name(output.dtype()), to_string(output.shape()));
  BALLAST_BY_NCCL(input, all_to_all(input, output));
  const std::size_t block = input.bytes() / size();
  if (block == 0) return;
  const auto* from = static_cast<const char*>(input.raw());
  auto* to = static_cast<char*>(output.raw());
  Messages messages(state_->comm, kCollectiveTag);
  for (int i = 1; i < size(); ++i)
    messages.receive(to + block * ((rank() + size() - i) % size()), block,
                     (rank() + size() - i) % size());
  for (int i = 1; i < size(); ++i)
    messages.send(from + block * ((rank() + i) % size()), block, (rank() + i) % size());
  std::memcpy(to + block * rank(), from + block * rank(), block);
  messages.wait();
}

void Communicator::broadcast(Tensor& tensor, int root) const {
  require_dense(tensor, "broadcast");
  require(root >= 0 && root < size(), "broadcast: rank {} lies outside a group of {}", root,
          size());
  BALLAST_BY_NCCL(tensor, broadcast(tensor, root));
  if (size() == 1) return;
  for (std::size_t at = 0; at < tensor.bytes(); at += largest_message()) {
    MPI_Request request;
    check_mpi(MPI_Ibcast(static_cast<char*>(tensor.raw()) + at,
                         static_cast<int>(std::min(largest_message(), tensor.bytes() - at)),
                         MPI_BYTE, root, state_->comm, &request),
              "MPI_Ibcast");
    state_->wait(request);
  }
}

std::string Communicator::broadcast(const std::string& text, int root) const {
  std::int64_t length = static_cast<std::int64_t>(text.size());
  Tensor size_tensor = Tensor::wrap(&length, {1}, DType::i64);
  broadcast(size_tensor, root);
  std::string result = rank() == root ? text : std::string(static_cast<std::size_t>(length), '\0');
  Tensor bytes = Tensor::wrap(result.data(), {length}, DType::u8);
  broadcast(bytes, root);
  return result;
}

std::vector<std::string> Communicator::all_gather(const std::string& text) const {
  std::vector<std::int64_t> lengths(size());
  lengths[rank()] = static_cast<std::int64_t>(text.size());
  state_->gather_blocks(lengths.data(), sizeof(std::int64_t));
  // Texts differ in length: gather them padded to the longest.
  const auto longest = static_cast<std::size_t>(*std::max_element(lengths.begin(), lengths.end()));
  std::string all(longest * size(), '\0');
  std::copy(text.begin(), text.end(), all.begin() + static_cast<std::ptrdiff_t>(longest * rank()));
  state_->gather_blocks(all.data(), longest);
  std::vector<std::string> texts(size());
  for (int r = 0; r < size(); ++r)
    texts[r] = all.substr(longest * r, static_cast<std::size_t>(lengths[r]));
  return texts;
}

void Communicator::barrier() const {
  if (size() == 1) return;
  MPI_Request request;
  check_mpi(MPI_Ibarrier(state_->comm, &request), "MPI_Ibarrier");
  state_->wait(request);
}

}  // namespace ballast
