// A host device with queues, as a GPU has them, that does every copy as late as fences allow: one
// that nobody waits for leaves NaN where it goes.
#pragma once
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/tensor.hpp"
#include "tests/parallel/comm/host_stand_in.hpp"

namespace ballast::testing {

/// Stands in for host_device() while it lives; memory that it gave may outlive it.  Computation on
/// the host is done when it is queued, so fences of the compute queue are empty.
class DelayedCopies {
 public:
  DelayedCopies() : device_(instance()) {
    device_.copies = device_.torn = 0;
    set_host_device(&device_);
  }
  ~DelayedCopies() {
    device_.finish();
    set_host_device(nullptr);
  }
  DelayedCopies(const DelayedCopies&) = delete;
  DelayedCopies& operator=(const DelayedCopies&) = delete;
  int copies() const { return device_.copies; }
  /// Copies whose memory was freed before they were done.
  int torn() const { return device_.torn; }
  Device& device() { return device_; }

 private:
  class Late final : public HostStandIn {
   public:
    std::string description() const override { return "host with late copies"; }
    void deallocate(void* pointer, std::size_t bytes) noexcept override {
      bool pinned = false;  // such memory is given back when no copy is under way
      for (const Queue queue : {Queue::to_host, Queue::to_device})
        for (const Work& work : at(queue).work) {
          const bool target = overlap(work.to, work.bytes, pointer, bytes),
                     source = overlap(work.from, work.bytes, pointer, bytes);
          torn += queue == Queue::to_host ? source : target;
          pinned |= queue == Queue::to_host ? target : source;
        }
      if (pinned) finish();
      HostStandIn::deallocate(pointer, bytes);
    }
    void synchronize() override { finish(); }
    void queue_copy(Queue queue, void* to, const void* from, std::size_t bytes) override {
      ++copies;
      if (bytes == 0) return;
      bool read = false;  // by a copy that this one will be ordered behind
      for (const Line& line : queues_)
        for (const Work& work : line.work) read |= overlap(work.from, work.bytes, to, bytes);
      if (!read) std::memset(to, 0xff, bytes);
      at(queue).work.push_back({to, from, bytes, {}});
    }
    Fence fence(Queue queue) override {
      if (queue == Queue::compute) return {};
      return {queue, at(queue).done + static_cast<std::int64_t>(at(queue).work.size())};
    }
    void wait(Fence fence, Queue later) override {
      if (fence.empty()) return;
      if (later == Queue::compute) return run(fence);
      at(later).work.push_back({nullptr, nullptr, 0, fence});
    }
    void wait(Fence fence) override {
      if (!fence.empty()) run(fence);
    }
    void finish() {
      for (const Queue queue : {Queue::to_host, Queue::to_device}) run(fence(queue));
    }
    int copies = 0, torn = 0;

   private:
    struct Work {
      void* to;
      const void* from;
      std::size_t bytes;
      Fence first;  ///< before anything else; a wait has no bytes
    };
    struct Line {
      std::deque<Work> work;
      std::int64_t done = 0;
    };
    Line& at(Queue queue) { return queues_[static_cast<int>(queue)]; }
    void run(Fence fence) {
      Line& line = at(fence.queue);
      while (line.done < fence.number) {
        const Work work = line.work.front();
        line.work.pop_front();
        ++line.done;
        if (!work.first.empty()) run(work.first);
        if (work.bytes > 0) std::memcpy(work.to, work.from, work.bytes);
      }
    }
    static bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
      const auto* x = static_cast<const char*>(a);
      const auto* y = static_cast<const char*>(b);
      return x < y + b_bytes && y < x + a_bytes;
    }
    Line queues_[kQueues];
  };
  static Late& instance() {
    static Late device;
    return device;
  }
  Late& device_;
};

}  // namespace ballast::testing
