// Where the GPU's time of a training step, or of another round of work, goes, by groups of kernels
// and by rank: the table of `ballast bench step DECK profile=N` and `ballast bench ring profile=N`.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "core/base/device.hpp"
#include "parallel/comm/comm.hpp"

namespace ballast {

/// Records `steps` steps on every rank of `world`.  Collective.  Errors: no GPU, or a GPU whose
/// kernels cannot be recorded (the reason is named).
class StepProfile {
 public:
  /// For errors the name of the benchmark and the setting that chooses a GPU; `step`: what a step
  /// is.
  StepProfile(Device& device, Communicator world, std::string benchmark, const std::string& setting,
              std::string step = "a step");
  /// Both wait for the work of all queues, so that as many updates as steps are recorded.
  void start();
  void stop(std::int64_t steps);
  /// Milliseconds a step and shares, of the mean over ranks and of each rank where there are
  /// several.
  std::string text() const;
  const nlohmann::ordered_json& json() const { return json_; }

 private:
  Device& device_;
  Communicator world_;
  std::string benchmark_, step_;
  nlohmann::ordered_json json_;
  std::string text_;
};

/// Group of a kernel by its mangled name: "matrix products", "attention forward", ...
std::string kernel_group(const std::string& name);

}  // namespace ballast
