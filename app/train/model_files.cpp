#include "app/train/model_files.hpp"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <optional>

#include "app/train/adapter_files.hpp"
#include "core/base/random.hpp"
#include "io/model/huggingface.hpp"
#include "io/model/safetensors.hpp"
#include "kernels/ops/elementwise.hpp"

namespace ballast {
namespace {

/// Takes a parameter's gradient, in pieces on the host, from a rank of its stage to the rank that
/// writes; `gradient`: undefined on that one where it is another stage's.
void pass_pieces(const Session& session, const Parameter& p, const Tensor& gradient, DType type,
                 bool writes, const std::function<void(const Tensor&)>& write) {
  for (std::int64_t at = 0; at < p.numel(); at += kPieceElements) {
    const std::int64_t end = std::min(at + kPieceElements, p.numel());
    const Tensor piece = gradient.defined() ? gradient.rows(at, end).to(host_device())
                                            : Tensor::empty({end - at}, type, host_device(),
                                                            MemoryCategory::communication);
    session.device.synchronize();
    if (gradient.defined() != writes)
      session.mesh.pp.exchange(std::vector<Transfer>{{piece, writes ? p.stage : 0, !writes}})
          .complete();
    if (writes) write(piece);
  }
}

}  // namespace

void load_base(Session& session) {
  const std::string& folder = session.config.model.weights;
  Parameters& parameters = session.parameters;
  if (parameters.frozen_numel() == 0 || folder.empty()) return;
  together(session.mesh.world, [&] {
    require(std::filesystem::is_directory(folder),
            "model.weights = \"{}\": no such folder; adapters need the weights that they were "
            "trained beside",
            folder);
    ModelShape plain = session.options.model;
    plain.lora = {};
    const auto table = parameter_table(
        plain, session.options.layer_begin);  // what is frozen of a stage is one range of it
    const DType type = parameters.dtype() == DType::f64 ? DType::f64 : DType::f32;
    std::vector<float> values;
    for (const Parameter& p : parameters.frozen_table()) {
      const std::int64_t first = parameters.offset(p.name);
      std::uint64_t print = stream_of(p.name.c_str());
      for (std::int64_t at = first; at < first + p.numel(); at += kPieceElements) {
        const std::int64_t end = std::min(at + kPieceElements, first + p.numel());
        Tensor piece = Tensor::empty({end - at}, type, host_device(), MemoryCategory::workspace);
        read_huggingface_weights(folder, table, session.stage.begin + at, session.stage.begin + end,
                                 piece);
        Tensor target = parameters.values().rows(at, end);
        if (target.dtype() == type)
          target.copy_from(piece);
        else
          copy_rows(piece.to(session.device), target);
        session.device.synchronize();  // before the piece goes
        // As fp32 in every precision, parameter by parameter: the same folder has the same
        // fingerprint on every mesh.
        dispatch_float(type, [&](auto t) {
          values.assign(piece.data<decltype(t)>(), piece.data<decltype(t)>() + piece.numel());
        });
        print = base_print(values, print);
      }
      if (!p.tied_copy) session.base_fingerprint += print;
    }
    parameters.values_changed();
  });
  const std::vector<std::string> stages =
      session.mesh.pp.all_gather(fmt::to_string(session.base_fingerprint));
  session.base_fingerprint = 0;
  for (const std::string& print : stages) session.base_fingerprint += std::stoull(print);
}

void load_weights(Session& session, ShardedOptimizer& optimizer) {
  const std::string& folder = session.config.model.weights;
  if (session.parameters.frozen_numel() > 0) return;
  together(session.mesh.world, [&] {
    require(std::filesystem::is_directory(folder),
            "model.weights = \"{}\": no such folder; a run that goes on (-r) does not need it",
            folder);
    Tensor& master = optimizer.state().master;
    const auto table = session.table();  // a stage is one range of it
    std::vector<ShardRun> runs = optimizer.runs();
    if (runs.empty()) runs.emplace_back();  // so that every rank sees the names and shapes
    for (const ShardRun& run : runs)
      for (std::int64_t at = 0; at == 0 || at < run.count(); at += kPieceElements) {
        const std::int64_t end = std::min(at + kPieceElements, run.count()),
                           first = session.stage.begin + run.begin;
        Tensor piece =
            Tensor::empty({end - at}, master.dtype(), host_device(), MemoryCategory::workspace);
        read_huggingface_weights(folder, table, first + at, first + end, piece);
        master.rows(run.at + at, run.at + end).copy_from(piece);
        session.device.synchronize();  // before the piece goes
      }
  });
  optimizer.values_from_master();
}

void dump_gradients(const std::string& file, Session& session, ShardedOptimizer& optimizer) {
  const Mesh& mesh = session.mesh;
  const auto table = session.table();
  const Parameters& parameters = session.parameters;
  together(mesh.world, [&] {
    const bool writes = mesh.at.pp == 0 && mesh.replica.rank() == 0;
    std::string
        problem;  // the writer takes in what the other stages send even when it cannot write
    const auto attempt = [&](const auto& work) {
      if (!writes || !problem.empty()) return;
      try {
        work();
      } catch (const std::exception& e) {
        problem = e.what();
      }
    };
    // A tied copy is the same parameter as the embedding.
    const auto left_out = [](const Parameter& p) { return p.tied_copy || !p.trainable; };
    std::vector<std::pair<std::string, Shape>> tensors;
    for (const Parameter& p : table)
      if (!left_out(p)) tensors.emplace_back(p.name, p.shape);
    std::optional<SafetensorsWriter> writer;
    attempt([&] { writer.emplace(file, tensors, "F32"); });
    std::vector<float> values;
    const auto take = [&](const Parameter& p, const Tensor& gradient) {
      pass_pieces(session, p, gradient, session.parameters.sum_type(), writes,
                  [&](const Tensor& piece) {
                    attempt([&] {
                      dispatch_float(piece.dtype(), [&](auto t) {
                        const auto* data = piece.data<decltype(t)>();
                        values.assign(data, data + piece.numel());
                      });
                      writer->append(values);
                    });
                  });
    };
    std::size_t gathered = 0;  // buckets
    Tensor bucket;
    for (const Parameter& p : table) {
      if (p.stage != mesh.at.pp) {
        if (writes && !left_out(p)) take(p, {});
        continue;
      }
      if (!p.trainable) continue;
      const std::int64_t offset = parameters.trainable_offset(p.name);
      while (gathered == 0 || parameters.buckets()[gathered - 1].end <= offset)
        bucket = optimizer.bucket_gradient(gathered++);  // by all replicas, which hold the same
      const std::int64_t first = offset - parameters.buckets()[gathered - 1].begin;
      if (!left_out(p) && mesh.replica.rank() == 0) take(p, bucket.rows(first, first + p.numel()));
    }
    attempt([&] { writer->finish(); });
    require(problem.empty(), "{}", problem);
  });
}

}  // namespace ballast
