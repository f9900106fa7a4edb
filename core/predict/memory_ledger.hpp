// Bytes in use by category, and the pools that executors lend buffers from, by their sizes alone:
// what core/predict/memory_replay replays.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/device.hpp"
#include "core/base/tensor.hpp"

namespace ballast {

struct MemoryEstimate {
  std::array<std::int64_t, kMemoryCategories> bytes{};  ///< peak of each MemoryCategory
  std::int64_t peak_bytes = 0;     ///< of all at once, on the device: without what is offloaded
  std::int64_t context_bytes = 0;  ///< of a GPU: what lies beside Ballast's own tensors
  std::int64_t pool_bytes = 0;     ///< of the workspace: what grew before and stays
  std::int64_t total() const { return peak_bytes + context_bytes; }
  /// The larger of both in every category.  A rank that does both keeps the larger pool, whichever
  /// grew it, beside the rest of either.
  void take_larger(const MemoryEstimate& other);
  /// The larger of both in every number, as they are.
  void take_peaks(const MemoryEstimate& other);
  std::int64_t operator[](MemoryCategory category) const {
    return bytes[static_cast<std::size_t>(category)];
  }
};

/// "1.50 GiB", "12.0 MiB", "640 B".
std::string bytes_text(double bytes);

/// Bytes in use now and at most.
class Ledger {
 public:
  void add(MemoryCategory category, std::int64_t bytes) {
    std::int64_t& now = now_[static_cast<std::size_t>(category)];
    now += bytes;
    std::int64_t& peak = peak_.bytes[static_cast<std::size_t>(category)];
    peak = std::max(peak, now);
    if (category == MemoryCategory::offloaded) return;
    total_ += bytes;
    peak_.peak_bytes = std::max(peak_.peak_bytes, total_);
  }
  const MemoryEstimate& peak() const { return peak_; }
  /// From now on: what a step does after the first one.
  void reset_peak() { peak_.bytes = now_, peak_.peak_bytes = total_; }
  /// What `work`, which gives back all that it takes, adds at most to what is in use.
  template <typename Work>
  MemoryEstimate rise(const Work& work) {
    const MemoryEstimate before = peak_;
    reset_peak();
    work();
    MemoryEstimate most = peak_;
    for (std::size_t c = 0; c < now_.size(); ++c) most.bytes[c] -= now_[c];
    most.peak_bytes -= total_;
    peak_.take_larger(before);
    return most;
  }
  /// Work whose rise is known.
  void touch(const MemoryEstimate& rise) {
    for (std::size_t c = 0; c < now_.size(); ++c)
      peak_.bytes[c] = std::max(peak_.bytes[c], now_[c] + rise.bytes[c]);
    peak_.peak_bytes = std::max(peak_.peak_bytes, total_ + rise.peak_bytes);
  }

 private:
  std::array<std::int64_t, kMemoryCategories> now_{};
  std::int64_t total_ = 0;
  MemoryEstimate peak_;
};

/// Bytes of one category, given back when it goes.
class Held {
 public:
  Held() = default;
  Held(Ledger& ledger, MemoryCategory category, std::int64_t bytes)
      : ledger_(&ledger), category_(category), bytes_(bytes) {
    ledger.add(category, bytes);
  }
  Held(Held&& other) noexcept { *this = std::move(other); }
  Held& operator=(Held&& other) noexcept {
    std::swap(ledger_, other.ledger_);
    std::swap(category_, other.category_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Held() {
    if (ledger_ != nullptr) ledger_->add(category_, -bytes_);
  }
  void grow(std::int64_t bytes) {
    ledger_->add(category_, bytes);
    bytes_ += bytes;
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  Ledger* ledger_ = nullptr;
  MemoryCategory category_ = MemoryCategory::activations;
  std::int64_t bytes_ = 0;
};

/// As kernels/ops/workspace: named buffers that grow.
class NamedScratch {
 public:
  explicit NamedScratch(Ledger& ledger) : ledger_(ledger) {}
  void take(std::string_view name, std::int64_t bytes) {
    if (settled_) return;
    auto at = held_.find(name);
    if (at == held_.end())
      at = held_.emplace(name, Held(ledger_, MemoryCategory::workspace, 0)).first;
    if (at->second.bytes() < bytes) at->second.grow(bytes - at->second.bytes());
  }
  /// What follows takes what was taken before, so that nothing grows.
  void settle() { settled_ = true; }
  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (const auto& [name, held] : held_) sum += held.bytes();
    return sum;
  }

 private:
  Ledger& ledger_;
  std::map<std::string, Held, std::less<>> held_;
  bool settled_ = false;
};

/// As parallel/context/ring_buffers: buffers that are lent and taken back, by size alone.
class LentBuffers {
 public:
  LentBuffers(Ledger& ledger, MemoryCategory category) : ledger_(ledger), category_(category) {}
  /// A buffer until it goes.
  class Loan {
   public:
    Loan() = default;
    Loan(LentBuffers& from, DType type, std::int64_t size) : from_(&from), buffer_(type, size) {}
    Loan(Loan&& other) noexcept
        : from_(std::exchange(other.from_, nullptr)), buffer_(other.buffer_) {}
    Loan& operator=(Loan&& other) noexcept {
      Loan old(std::move(other));
      std::swap(from_, old.from_);
      std::swap(buffer_, old.buffer_);
      return *this;
    }
    ~Loan() {
      if (from_ != nullptr) from_->free_.push_back(buffer_);
    }

   private:
    LentBuffers* from_ = nullptr;
    std::pair<DType, std::int64_t> buffer_;
  };
  Loan take(DType type, std::int64_t elements, std::int64_t capacity = 0) {
    auto fits = free_.end(), small = free_.end();
    for (auto at = free_.begin(); at != free_.end(); ++at) {
      if (at->first != type) continue;
      if (at->second >= elements) {
        if (fits == free_.end() || at->second < fits->second) fits = at;
      } else if (small == free_.end() || at->second > small->second) {
        small = at;
      }
    }
    std::int64_t size = 0;
    if (fits != free_.end()) {
      size = fits->second;
      free_.erase(fits);
    } else {
      const auto bytes = [&](std::int64_t n) {
        return n * static_cast<std::int64_t>(size_of(type));
      };
      if (small != free_.end()) {
        ledger_.add(category_, -bytes(small->second));
        free_.erase(small);
      }
      size = std::max({elements, capacity, std::int64_t{1}});
      ledger_.add(category_, bytes(size));
      ++made_;
    }
    return Loan(*this, type, size);
  }
  /// Buffers made so far: while it stays and none is lent, the pool is the same.
  std::int64_t made() const { return made_; }

 private:
  Ledger& ledger_;
  MemoryCategory category_;
  std::vector<std::pair<DType, std::int64_t>> free_;
  std::int64_t made_ = 0;
};

/// Work that takes the same buffers from the same pool each time, and gives them back.
class KnownRise {
 public:
  template <typename Work>
  void take(Ledger& ledger, const LentBuffers& pool, const Work& work) {
    const std::int64_t made = pool.made();
    if (made_ == made) return ledger.touch(rise_);
    const MemoryEstimate rise = ledger.rise(work);
    if (pool.made() == made) made_ = made, rise_ = rise;
  }

 private:
  std::int64_t made_ = -1;  ///< the pool's, when the rise was found
  MemoryEstimate rise_;
};

}  // namespace ballast
