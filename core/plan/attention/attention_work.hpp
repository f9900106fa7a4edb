// AttentionWork: a pattern as executors hold it, on the host or as a backend's device twin.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <variant>

#include "core/plan/attention/attention_pattern.hpp"

namespace ballast {

/// A pattern whose arrays lie on a device: its counts are all that the host knows.  Made by a
/// backend, from a host pattern or from scores that lie on the device too.
class DevicePattern {
 public:
  explicit DevicePattern(PatternCounts counts) : counts_(std::move(counts)) {}
  virtual ~DevicePattern() = default;
  const PatternCounts& counts() const { return counts_; }

 private:
  PatternCounts counts_;
};

/// A cheap handle; copies share what they refer to.
class AttentionWork {
 public:
  AttentionWork(AttentionPattern pattern) : work_(std::move(pattern)) {}
  AttentionWork(std::shared_ptr<const DevicePattern> twin) : work_(std::move(twin)) {}

  /// Null where the pattern lies on the other side.
  const AttentionPattern* host() const { return std::get_if<AttentionPattern>(&work_); }
  const DevicePattern* device() const {
    const auto* twin = std::get_if<std::shared_ptr<const DevicePattern>>(&work_);
    return twin ? twin->get() : nullptr;
  }
  const PatternCounts& counts() const { return host() ? host()->counts() : device()->counts(); }
  std::int64_t q_tokens() const { return counts().q_tokens; }
  std::int64_t k_tokens() const { return counts().k_tokens; }
  int index_heads() const { return counts().index_heads; }
  double pairs_per_head() const { return counts().pairs_per_head(); }

 private:
  std::variant<AttentionPattern, std::shared_ptr<const DevicePattern>> work_;
};

}  // namespace ballast
