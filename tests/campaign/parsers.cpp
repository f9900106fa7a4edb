// Feeds files to the parsers in one process: a line "KIND PATH" of the standard input gives a line
// "accepted" or "refused MESSAGE".  A crash or a hang is then that of a parser.
#include <mpi.h>

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "io/checkpoint/checkpoint_file.hpp"
#include "io/data/dataset.hpp"
#include "io/deck/deck_reader.hpp"
#include "io/model/huggingface.hpp"
#include "io/model/safetensors.hpp"

namespace ballast {
namespace {

/// Everything that a run would read of a dataset.
void walk(const Dataset& dataset) {
  for (std::int64_t s = 0; s < std::min<std::int64_t>(dataset.samples(), 64); ++s) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(dataset.length(s)));
    dataset.tokens(s, 0, dataset.length(s), tokens);
    dataset.targets(s, 0, dataset.length(s), tokens);
  }
}

void parse(const std::string& kind, const std::string& path) {
  if (kind == "deck") {
    read_deck(path, {}, "", {.model = true, .data = false, .weights = false});
  } else if (kind == "checkpoint") {
    check_seal(path);
    const CheckpointFile file(path);
    file.verify(0, file.checksums().size());
  } else if (kind == "safetensors") {
    const Safetensors file(path);
    for (const std::string& name : file.names()) {
      std::vector<float> values(static_cast<std::size_t>(file.entry(name).numel()));
      file.read(name, 0, std::span<float>(values));
    }
  } else if (kind == "config") {
    read_huggingface_config(path);
  } else {
    DataOptions options;
    options.source = parse_or_fail<DataSource>(kind, "data source");  // megatron, hdf5 or lengths
    (kind == "lengths" ? options.lengths_file : options.path) = path;
    walk(*open_dataset(options));
  }
}

}  // namespace
}  // namespace ballast

int main(int argc, char** argv) {
  using namespace ballast;
  hdf5::start();
  MPI_Init(&argc, &argv);
  {
    const Kokkos::ScopeGuard scope(argc, argv);
    std::string kind, path;
    while (std::cin >> kind >> path) {
      try {
        parse(kind, path);
        std::puts("accepted");
      } catch (const std::exception& error) {
        std::string text = error.what();
        std::replace(text.begin(), text.end(), '\n', ' ');
        std::printf("refused %s\n", text.c_str());
      }
      std::fflush(stdout);
    }
  }
  MPI_Finalize();
  return 0;
}
