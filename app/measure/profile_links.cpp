#include "app/measure/profile_links.hpp"

#include <algorithm>
#include <chrono>

namespace ballast {

ProfileLink fit_link(const std::string& level, const std::vector<double>& bytes,
                     const std::vector<double>& seconds) {
  // Minimises sum ((a + b x) / t - 1)^2.
  double s00 = 0, s01 = 0, s11 = 0, r0 = 0, r1 = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const double u = 1 / seconds[i], v = bytes[i] / seconds[i];
    s00 += u * u, s01 += u * v, s11 += v * v, r0 += u, r1 += v;
  }
  const double determinant = s00 * s11 - s01 * s01;
  double latency = (r0 * s11 - r1 * s01) / determinant,
         per_byte = (r1 * s00 - r0 * s01) / determinant;
  if (!(latency >= 0)) latency = 0, per_byte = r1 / s11;
  if (!(per_byte > 0)) per_byte = seconds.back() / bytes.back();
  return {level, latency, 1 / per_byte};
}

std::vector<ProfileLink> measure_links(const Mesh& mesh, Device& device, std::int64_t repeats,
                                       std::int64_t largest_bytes) {
  std::vector<ProfileLink> links;
  struct Level {
    const char* name;
    const Communicator& group;
    int channel;
  };
  for (const auto& [name, group, channel] :
       {Level{"inner", mesh.cp_inner, 0}, Level{"outer", mesh.cp_outer, 1},
        Level{"stage", mesh.pp, 0}, Level{"dp", mesh.dp, 0}}) {
    if (group.size() < 2) continue;
    const int next = (group.rank() + 1) % group.size(),
              last = (group.rank() + group.size() - 1) % group.size();
    std::vector<double> bytes, seconds;
    for (std::int64_t size = 4096; size <= largest_bytes; size *= 4) {
      Tensor sent = Tensor::zeros({size}, DType::u8, device, MemoryCategory::communication),
             received = Tensor::zeros({size}, DType::u8, device, MemoryCategory::communication);
      std::vector<double> times;
      for (std::int64_t i = -2; i < repeats; ++i) {
        device.synchronize();
        mesh.world.barrier();
        const auto begin = std::chrono::steady_clock::now();
        const Transfer transfers[] = {{received, last, false}, {sent, next, true}};
        group.exchange(transfers, channel).complete();
        device.synchronize();
        if (i >= 0)
          times.push_back(
              std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
      }
      std::sort(times.begin(), times.end());
      bytes.push_back(static_cast<double>(size));
      seconds.push_back(mesh.world.all_reduce(times[times.size() / 2], Reduction::max));
    }
    links.push_back(fit_link(name, bytes, seconds));
  }
  return links;
}

}  // namespace ballast
