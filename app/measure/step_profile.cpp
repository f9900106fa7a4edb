#include "app/measure/step_profile.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <utility>
#include <vector>

#include "app/train/session.hpp"
#include "core/base/error.hpp"
#ifdef BALLAST_HAVE_CUDA
#include "kernels/cuda/runtime/kernel_trace.hpp"
#endif

namespace ballast {
namespace {

struct GroupRule {
  const char* part;  ///< of a mangled name, which has the file of a local kernel
  const char* group;
};
// The first that fits counts.
constexpr std::array<GroupRule, 28> kRules = {{
    {"attention_forward", "attention forward"},
    {"forward_plain", "attention forward"},
    {"merge_kernel", "attention forward"},
    {"routed_forward", "attention forward"},
    {"routed_backward", "attention backward"},
    {"attention_query_gradient", "attention backward"},
    {"attention_backward", "attention backward"},
    {"gradient_plain", "attention backward"},
    {"statistics_kernel", "attention backward"},
    {"delta_kernel", "attention backward"},
    {"_fp8_cu", "FP8 rounding"},
    {"_rmsnorm_cu", "norms"},
    {"_qk_norm_cu", "QK-norm and RoPE"},
    {"swiglu", "SwiGLU"},
    {"rope", "RoPE"},
    {"_cross_entropy_cu", "loss"},
    {"_adamw_cu", "optimizer and gradient norm"},
    {"_muon_cu", "optimizer and gradient norm"},
    {"_embedding_cu", "embedding"},
    {"3cub", "embedding"},
    {"_elementwise_cu", "copies, additions, biases"},
    {"_bias_cu", "copies, additions, biases"},
    {"nccl", "NCCL"},
    {"[mem", "memory sets and copies"},
    {"_attention_cu", "attention index and order"},
    {"accumulate_offsets", "attention index and order"},
    {"_cu_", "attention index and order"},
    {"ballast", "other"},
}};
constexpr const char *kProducts = "matrix products", *kWhole = "step";

#ifdef BALLAST_HAVE_CUDA
/// Milliseconds a step of each group, of one rank.  What no kernel covers is "(idle)", or waits for
/// the host where it lasts longer than a launch.
std::map<std::string, double> by_group(const std::map<std::string, double>& kernels, double span_s,
                                       double busy_s, double pauses_s, std::int64_t steps) {
  const double each = 1e3 / static_cast<double>(steps);
  std::map<std::string, double> groups{{"(idle)", (span_s - busy_s - pauses_s) * each},
                                       {"(waits for the host)", pauses_s * each}};
  for (const auto& [name, seconds] : kernels) groups[kernel_group(name)] += seconds * each;
  return groups;
}
#endif

}  // namespace

std::string kernel_group(const std::string& name) {
  for (const GroupRule& rule : kRules)
    if (name.find(rule.part) != std::string::npos) return rule.group;
  return kProducts;  // cuBLASLt's own names
}

StepProfile::StepProfile(Device& device, Communicator world, std::string benchmark,
                         const std::string& setting, std::string step)
    : device_(device),
      world_(std::move(world)),
      benchmark_(std::move(benchmark)),
      step_(std::move(step)) {
  require(device.space() == Space::cuda,
          "bench {}: profile=N records a GPU's kernels, and this run computes on the host; set "
          "{}=cuda",
          benchmark_, setting);
}

void StepProfile::start() {
  device_.synchronize();
#ifdef BALLAST_HAVE_CUDA
  together(world_, [&] {
    const std::string why = cuda::start_kernel_trace();
    require(why.empty(), "bench {}: profile=N: {}", benchmark_, why);
  });
#endif
}

void StepProfile::stop(std::int64_t steps) {
  device_.synchronize();
  nlohmann::ordered_json mine;
#ifdef BALLAST_HAVE_CUDA
  const cuda::KernelTrace trace = cuda::stop_kernel_trace();
  std::map<std::string, double> kernels;
  nlohmann::ordered_json list;
  for (const cuda::KernelTime& k : trace.kernels) {
    kernels[k.name] += k.seconds;
    list.push_back({{"name", k.name},
                    {"group", kernel_group(k.name)},
                    {"launches", k.launches},
                    {"ms_per_step", 1e3 * k.seconds / static_cast<double>(steps)}});
  }
  mine["step_ms"] = 1e3 * trace.span_s / static_cast<double>(steps);
  mine["groups_ms"] = by_group(kernels, trace.span_s, trace.busy_s, trace.pauses_s, steps);
  mine["kernels"] = std::move(list);
#endif
  const std::vector<std::string> all = world_.all_gather(mine.dump());
  std::map<std::string, std::vector<double>> groups;
  json_["steps"] = steps;
  for (std::size_t r = 0; r < all.size(); ++r) {
    const auto rank = nlohmann::ordered_json::parse(all[r]);
    for (const auto& [group, ms] : rank.at("groups_ms").items()) {
      groups[group].resize(all.size());
      groups[group][r] = ms.get<double>();
    }
    groups[kWhole].resize(all.size());
    groups[kWhole][r] = rank.at("step_ms").get<double>();
    json_["ranks"].push_back(rank);
  }
  const auto mean = [](const std::vector<double>& values) {
    double sum = 0;
    for (const double v : values) sum += v;
    return sum / static_cast<double>(values.size());
  };
  std::vector<std::pair<std::string, std::vector<double>>> rows(groups.begin(), groups.end());
  std::sort(rows.begin(), rows.end(),
            [&](const auto& a, const auto& b) { return mean(a.second) > mean(b.second); });
  const double whole = mean(groups.at(kWhole));
  text_ = fmt::format("  {:<30}{:>10}{:>8}", fmt::format("of the GPU, {}", step_), "ms", "share");
  for (std::size_t r = 0; all.size() > 1 && r < all.size(); ++r)
    text_ += fmt::format("{:>10}", fmt::format("rank {}", r));
  for (const auto& [group, ms] : rows) {
    text_ += fmt::format("\n  {:<30}{:>10.3f}{:>8.4f}", group, mean(ms),
                         whole > 0 ? mean(ms) / whole : 0);
    for (std::size_t r = 0; all.size() > 1 && r < all.size(); ++r)
      text_ += fmt::format("{:>10.3f}", ms[r]);
  }
  text_ += "\n";
}

std::string StepProfile::text() const { return text_; }

}  // namespace ballast
