// ballast train: a run from its deck, or from a checkpoint on.
#include "app/command/command_line.hpp"
#include "app/train/trainer.hpp"

namespace ballast {

int train_command(const CommandLine& line) {
  const Communicator world = Communicator::world();
  const Config config = line.config(world);
  catch_stop_signals();  // again: libraries may have taken them since main
  Trainer trainer(
      {line.output_folder(config), line.restart, line.force_model, line.wall_time_s, line.json},
      world, config);
  try {
    return trainer.run();
  } catch (const CollectiveError& error) {
    trainer.note_failure(error.what());
    throw;
  }
}

}  // namespace ballast
