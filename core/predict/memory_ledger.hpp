// Bytes in use by category, and the pools that executors lend buffers from, by their sizes alone:
// what core/predict/memory_replay replays.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/device.hpp"
#include "core/base/tensor.hpp"

namespace ballast {

struct MemoryEstimate {
  std::array<std::int64_t, kMemoryCategories> bytes{};  ///< peak of each MemoryCategory
  std::int64_t peak_bytes = 0;     ///< of all at once, on the device: without what is offloaded
  std::int64_t context_bytes = 0;  ///< of a GPU: what lies beside Ballast's own tensors
  std::int64_t total() const { return peak_bytes + context_bytes; }
  /// The larger of both in every category.
  void take_larger(const MemoryEstimate& other) {
    for (std::size_t c = 0; c < bytes.size(); ++c) bytes[c] = std::max(bytes[c], other.bytes[c]);
    peak_bytes = std::max(peak_bytes, other.peak_bytes);
    context_bytes = std::max(context_bytes, other.context_bytes);
  }
  std::int64_t operator[](MemoryCategory category) const {
    return bytes[static_cast<std::size_t>(category)];
  }
};

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
  void take(const std::string& name, std::int64_t bytes) {
    const auto [at, fresh] = held_.try_emplace(name);
    if (fresh) at->second = Held(ledger_, MemoryCategory::workspace, 0);
    if (at->second.bytes() < bytes) at->second.grow(bytes - at->second.bytes());
  }

 private:
  Ledger& ledger_;
  std::map<std::string, Held> held_;
};

/// As parallel/context/ring_buffers: buffers that are lent and taken back, by size alone.
class LentBuffers {
 public:
  LentBuffers(Ledger& ledger, MemoryCategory category) : ledger_(ledger), category_(category) {}
  using Loan = std::shared_ptr<void>;
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
    }
    return Loan(nullptr, [this, type, size](void*) { free_.emplace_back(type, size); });
  }

 private:
  Ledger& ledger_;
  MemoryCategory category_;
  std::vector<std::pair<DType, std::int64_t>> free_;
};

}  // namespace ballast
