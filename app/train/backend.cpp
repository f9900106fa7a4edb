#include "app/train/backend.hpp"

#ifdef BALLAST_HAVE_CUDA
#include "kernels/cuda/ops/operations.hpp"
#include "kernels/cuda/runtime/device.hpp"
#include "parallel/comm/nccl_group.hpp"
#endif

namespace ballast {

std::string missing_gpu(const Communicator& world) {
  std::string why = "this program was built without CUDA";
#ifdef BALLAST_HAVE_CUDA
  if (cuda::device_count(why) > 0) why.clear();
#endif
  // Ranks must agree: a mixed run would wait for transfers that never come.
  const std::vector<std::string> reasons = world.all_gather(why);
  for (std::size_t r = 0; r < reasons.size(); ++r)
    if (!reasons[r].empty()) return fmt::format("rank {} has no GPU ({})", r, reasons[r]);
  return "";
}

BackendChoice choose_backend(const Config& config, const Communicator& world) {
  BackendChoice choice;
  choice.device = &host_device();
  choice.clock = &host_clock();
  choice.dtype = compute_type(Backend::host, config.run.precision);
  if (config.run.backend != Backend::cuda) return choice;

  if (const std::string missing = missing_gpu(world); !missing.empty()) {
    choice.note =
        fmt::format("run.backend = \"cuda\": {}; all ranks use the host backend", missing);
    return choice;
  }
#ifdef BALLAST_HAVE_CUDA
  const Communicator machine = world.split_by_machine();
  auto gpu = std::make_unique<cuda::CudaDevice>(machine.rank());
#ifdef BALLAST_HAVE_NCCL
  choice.note = NcclGroup::let_ranks_share_gpus(world, machine, gpu->identity());
#endif
  choice.owned_device = std::move(gpu);
  choice.device = choice.owned_device.get();
  require(!config.run.fp8() || cuda::has_fp8(),
          "run.precision = \"fp8\": {} has no FP8 products with scaled blocks; they need a GPU of "
          "compute capability 9.0 and cuBLASLt of CUDA 12.9 or newer. Set \"bf16\"",
          choice.device->description());
  set_cuda_device(choice.device);
  choice.owned_pinned = std::make_unique<cuda::PinnedHost>();
  set_pinned_device(choice.owned_pinned.get());
  cuda::set_deterministic(config.run.deterministic);
  choice.owned_clock = cuda::device_clock();
  choice.clock = choice.owned_clock.get();
  choice.dtype = DType::bf16;
#endif
  return choice;
}

void expect_lengths([[maybe_unused]] const BackendChoice& backend,
                    [[maybe_unused]] std::int64_t most_tokens) {
#ifdef BALLAST_HAVE_CUDA
  if (backend.device->space() == Space::cuda) cuda::expect_lengths(most_tokens);
#endif
}

void choose_products_early([[maybe_unused]] const BackendChoice& backend) {
#ifdef BALLAST_HAVE_CUDA
  if (backend.device->space() == Space::cuda) cuda::try_products_after(0);
#endif
}

void hold_choices([[maybe_unused]] const BackendChoice& backend, [[maybe_unused]] bool held) {
#ifdef BALLAST_HAVE_CUDA
  if (backend.device->space() == Space::cuda) cuda::hold_trials(held);
#endif
}

std::int64_t choices_put_off([[maybe_unused]] const BackendChoice& backend) {
#ifdef BALLAST_HAVE_CUDA
  if (backend.device->space() == Space::cuda) return cuda::trials_put_off();
#endif
  return 0;
}

}  // namespace ballast
