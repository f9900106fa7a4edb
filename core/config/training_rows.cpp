#include "core/config/training_rows.hpp"

#include "core/config/config.hpp"

namespace ballast {

using namespace deck_row;

void loss_rows(Schema& schema) {
  const auto kind = on(&Config::loss, &LossConfig::kind);
  auto loss = schema.block("loss", &Config::loss);
  loss.key("kind", &LossConfig::kind,
           "cross_entropy: of the next token; dpo: sigmoid loss of direct preference optimization "
           "over pairs of a chosen and a rejected answer, mean over the global batch's pairs");
  loss.key("normaliser", &LossConfig::normaliser,
           "ave_token: summed token loss of the global batch over its loss tokens, exact on every "
           "mesh; token_mean: mean over micro-batches of their mean token loss; sample_mean: mean "
           "over micro-batches of the mean over their samples; sequence_mean: mean over the global "
           "batch's samples of their mean token loss, exact on every mesh (LongAlign); sum: of all "
           "token losses")
      .allow({"ave_token", "token_mean", "sample_mean", "sequence_mean", "sum"})
      .when(kind, LossKind::cross_entropy);
}

void dpo_rows(Schema& schema) {
  const auto kind = on(&Config::loss, &LossConfig::kind);
  auto dpo = schema.block("dpo", &Config::dpo);
  dpo.key("beta", &DpoConfig::beta, "", above(0),
          "strength of the pull towards the reference: a reward is beta times the log probability "
          "of an answer over that of the reference")
      .when(kind, LossKind::dpo);
  dpo.key("label_smoothing", &DpoConfig::label_smoothing, "", up_to(0, 0.5),
          "share of the pairs whose preference is taken for wrong (conservative DPO)")
      .when(kind, LossKind::dpo);
  dpo.key("reference", &DpoConfig::reference,
          "HDF5 file with the reference's log probabilities, which `ballast reference` writes")
      .when(kind, LossKind::dpo)
      .when(on(&Config::dpo, &DpoConfig::reference_free), false);
  dpo.key("reference_free", &DpoConfig::reference_free,
          "no reference: its log probabilities count as 0")
      .when(kind, LossKind::dpo);
}

void curriculum_rows(Schema& schema) {
  const auto steps = on(&Config::curriculum, &CurriculumConfig::steps);
  auto curriculum = schema.block("curriculum", &Config::curriculum);
  curriculum.key("steps", &CurriculumConfig::steps, "steps", between(0, kTokens),
                 "first steps of the run that take short samples alone; the long ones follow later "
                 "in the first epoch");
  curriculum
      .key("max_tokens", &CurriculumConfig::max_tokens, "tokens", between(0, kTokens),
           "longest sample of those steps; 0: the first packing group's length (batching.method = "
           "\"hbp\")")
      .when(steps);
}

void optimizer_rows(Schema& schema) {
  auto optimizer = schema.block("optimizer", &Config::optimizer);
  const auto schedule = on(&Config::optimizer, &OptimizerConfig::schedule);
  const auto kind = on(&Config::optimizer, &OptimizerConfig::kind);
  using enum LearningRateSchedule;
  optimizer.key("kind", &OptimizerConfig::kind,
                "adamw; or muon: momentum whose matrices are orthogonalised, for the matrices of "
                "layers, and adamw for embedding, head, norms and biases");
  optimizer.key(
      "schedule", &OptimizerConfig::schedule,
      "learning rate after the warm-up: constant; linear or cosine: falling to the minimum "
      "at decay_steps; wsd (warm-up, stable, decay): constant, then a line to the minimum "
      "over the last wsd_decay_steps");
  optimizer.key("learning_rate", &OptimizerConfig::learning_rate, "", at_least(0),
                "peak learning rate");
  optimizer
      .key("minimum_learning_rate", &OptimizerConfig::minimum_learning_rate, "", at_least(0),
           "learning rate at the end of the decay")
      .when(schedule, linear, cosine, wsd);
  optimizer.key("warmup_steps", &OptimizerConfig::warmup_steps, "steps", between(0, kTokens),
                "linear warm-up");
  optimizer
      .key("decay_steps", &OptimizerConfig::decay_steps, "steps", between(0, kTokens),
           "step at which the decay ends; 0: run.steps")
      .when(schedule, linear, cosine, wsd);
  optimizer
      .key("wsd_decay_steps", &OptimizerConfig::wsd_decay_steps, "steps", between(0, kTokens),
           "wsd: steps that the decay takes; 0: a tenth of all")
      .when(schedule, wsd);
  optimizer.key("beta1", &OptimizerConfig::beta1, "", up_to(0, 1), "decay of the first moment");
  optimizer.key("beta2", &OptimizerConfig::beta2, "", up_to(0, 1), "decay of the second moment");
  optimizer
      .key("moments", &OptimizerConfig::moments,
           "full: both moments in the precision of master weights; bf16: half of that, rounded by "
           "chance so that they do not stand still; master weights stay full")
      .when(kind, OptimizerKind::adamw);
  optimizer
      .key("gradients", &OptimizerConfig::gradients,
           "full: gradients are kept and summed in the precision of master weights; bf16: in half "
           "of that, what a micro-batch adds (the head: model.head_chunk_tokens of it) and every "
           "sum rounded to nearest, over ranks too; shards of zero = 2 stay full")
      .when(kind, OptimizerKind::adamw);
  optimizer.key("eps", &OptimizerConfig::eps, "", at_least(1e-37), "epsilon of AdamW");
  optimizer
      .key("momentum", &OptimizerConfig::momentum, "", up_to(0, 1), "muon: decay of the momentum")
      .when(kind, OptimizerKind::muon);
  optimizer
      .key("nesterov", &OptimizerConfig::nesterov,
           "muon: the update looks ahead, gradient + momentum * moment in place of the moment")
      .when(kind, OptimizerKind::muon);
  optimizer
      .key("newton_schulz_steps", &OptimizerConfig::newton_schulz_steps, "", between(1, 32),
           "muon: steps of the quintic Newton-Schulz iteration")
      .when(kind, OptimizerKind::muon);
  optimizer
      .key("update_rms", &OptimizerConfig::update_rms, "", at_least(0),
           "muon: root mean square of an update of full rank over the learning rate: an "
           "orthogonal matrix times update_rms * sqrt(max(rows, columns)); 0.2 is AdamW's, so that "
           "learning rate and weight decay serve both (Moonlight); 0: sqrt(max(1, rows / columns)) "
           "instead")
      .when(kind, OptimizerKind::muon);
  optimizer.key("weight_decay", &OptimizerConfig::weight_decay, "", at_least(0),
                "decoupled weight decay of the matrices, embedding and head included");
  optimizer.key("clip_norm", &OptimizerConfig::clip_norm, "", at_least(0),
                "limit of the global gradient norm; 0: none");
  optimizer.key("zero", &OptimizerConfig::zero, "", between(0, 2),
                "ZeRO stage over the ranks that hold the same parameters: 0 replicated, 1 "
                "optimizer state, 2 gradients too");
  optimizer
      .key(
          "bucket_bytes", &OptimizerConfig::bucket_bytes, "bytes", between(1, 1ll << 50),
          "gradients that are reduced, and parameters that are gathered, in one call: neighbouring "
          "layers up to this many bytes of gradients, one layer at least; every rank's shard has "
          "its part of each bucket")
      .when(kind, OptimizerKind::adamw);
}

void recompute_rows(Schema& schema) {
  const auto mode = on(&Config::recompute, &RecomputeOptions::mode);
  auto recompute = schema.block("recompute", &Config::recompute);
  recompute.key("mode", &RecomputeOptions::mode,
                "what backward recomputes: selective: norms and SwiGLU products; full: whole "
                "layers from their input");
  recompute
      .key("layers", &RecomputeOptions::layers, "layers", between(-1, 1 << 16),
           "the first layers of a stage recompute, the others keep everything; -1: all recompute")
      .when(mode, Recompute::selective, Recompute::full);
}

void lora_rows(Schema& schema) {
  const auto rank = on(&Config::lora, &LoraConfig::rank);
  auto lora = schema.block("lora", &Config::lora);
  lora.key(
      "rank", &LoraConfig::rank, "", between(0, 1 << 16),
      "rank of the adapters that are trained in place of the weights; 0: none, the weights are");
  lora.key("alpha", &LoraConfig::alpha, "", above(0),
           "an adapter's output is multiplied by alpha / rank")
      .when(rank);
  lora.key("dropout", &LoraConfig::dropout, "", up_to(0, 1),
           "share of an adapter's inputs dropped in training")
      .when(rank);
  lora.key("projections", &LoraConfig::projections,
           "matrices of a layer that get an adapter: some of q, k, v, o, gate, up, down")
      .when(rank);
}

void eval_rows(Schema& schema) {
  auto eval = schema.block("eval", &Config::eval);
  eval.key("every_steps", &EvalConfig::every_steps, "steps", between(0, kTokens),
           "steps between held-out losses; 0: none while training");
  const auto every = on(&Config::eval, &EvalConfig::every_steps);
  eval.key("samples", &EvalConfig::samples, "samples", between(0, kTokens),
           "held-out samples to use; 0: all")
      .when(every);
  eval.key("depths", &EvalConfig::depths, "parts", between(1, 1 << 10),
           "needle: parts of the context whose accuracy is reported apart")
      .when(every)
      .when(on(&Config::data, &DataConfig::source), DataSource::needle);
  const auto generate = schema.part<GenerateConfig>(
      "eval", [](Config& c) -> GenerateConfig& { return c.eval.generate; }, "generate_");
  generate
      .key("tokens", &GenerateConfig::tokens, "tokens", between(0, 1 << 20),
           "most tokens that each evaluation lets the model write after each prompt; 0: none. "
           "Every token is a forward pass over all prompts")
      .when(every);
  const Switch<std::int64_t> tokens{&default_config().eval.generate.tokens};
  generate
      .key("prompts", &GenerateConfig::prompts,
           "texts to continue, for data of bytes (data.source = \"files\")")
      .when(tokens);
  generate
      .key("samples", &GenerateConfig::samples, "samples", between(0, 1 << 16),
           "held-out samples whose beginnings are prompts too")
      .when(tokens);
  generate
      .key("prefix_tokens", &GenerateConfig::prefix_tokens, "tokens", between(0, kTokens),
           "tokens of such a beginning; 0: up to the first token that carries loss, as the prompt "
           "of a conversation, or a quarter of the sample where all do")
      .when(tokens);
  generate
      .key("temperature", &GenerateConfig::temperature, "", at_least(0),
           "logits are divided by it before a token is drawn; 0: the most likely token")
      .when(tokens);
  generate
      .key("seed", &GenerateConfig::seed, "", at_least(0),
           "of the draws, which depend on it, a text's place in the list and the position alone")
      .when(tokens);
  generate
      .key("stop_token", &GenerateConfig::stop_token, "", between(-1, kTokens),
           "token that ends a text, such as the tokenizer's end of sequence; -1: none does")
      .when(tokens);
}

}  // namespace ballast
