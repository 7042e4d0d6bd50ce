"""What a training run tells its learner: the run's config in the learner's words."""

from __future__ import annotations

from pathlib import Path

from harness_rl.config import RunConfig
from harness_rl.learner.spec import LearnerSpec
from harness_rl.orchestrator.services import Services


def learner_spec(config: RunConfig, services: Services, model: Path, lineage: str, *, resume: bool, reference: str) -> LearnerSpec:
    learner, sync, checkpoint = config.learner, config.sync, config.checkpoint
    return LearnerSpec(
        model=str(model),
        run_dir=str(config.run_dir),
        lineage=lineage,
        engines=services.engine_urls,
        served_model=services.model,
        seed=config.run.seed,
        learning_rate=learner.learning_rate,
        warmup_steps=learner.warmup_steps,
        schedule=learner.schedule,
        total_updates=config.run.steps * learner.minibatches,
        adam_beta1=learner.adam_beta1,
        adam_beta2=learner.adam_beta2,
        adam_epsilon=learner.adam_epsilon,
        scale_by_signal=learner.scale_by_signal,
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        objective=learner.objective,
        epsilon_low=learner.epsilon_low,
        epsilon_high=learner.epsilon_high,
        ratio_max=learner.ratio_max,
        ratio=learner.ratio,
        corrections=learner.corrections,
        truncation=learner.truncation,
        kl_beta=learner.kl_beta,
        reference_model=learner.reference_model or reference,
        loss_normalisation=learner.loss_normalisation,
        loss_constant=learner.loss_constant or float(config.rollout.max_conversation_tokens or config.engine.max_model_len),
        minibatches=learner.minibatches,
        micro_batch_tokens=learner.micro_batch_tokens,
        packing=learner.packing,
        gradient_checkpointing=learner.gradient_checkpointing,
        offload_activations=learner.offload_activations,
        lora_rank=learner.lora_rank,
        lora_alpha=learner.lora_alpha,
        lora_targets=learner.lora_targets,
        processes=learner.processes,
        context_parallel=learner.context_parallel,
        optimizer=learner.optimizer,
        offload_optimizer=learner.offload_optimizer,
        audit=learner.audit,
        max_rejected_rows=learner.max_rejected_rows,
        device=learner.device,
        dtype=learner.dtype,
        threads=-(-services.learner_threads // learner.processes),
        sync_backend=sync.backend,
        sync_timeout_s=sync.timeout_s,
        sync_host=sync.host,
        sync_mode=sync.mode,
        sync_kv=sync.kv,
        sync_every=sync.every,
        sync_lora=sync.lora,
        sync_wait_s=sync.wait_s,
        sync_sleep=sync.sleep,
        engine_dtype=services.engine_dtype,
        link_timeout_s=learner.step_timeout_s,  # a sync may have to wait for an evaluation
        probe_tokens=sync.probe_tokens,
        probe_bound=sync.probe_bound,
        checkpoint_every=checkpoint.every,
        keep_checkpoints=checkpoint.keep,
        push_to_hub=checkpoint.push_to_hub,
        hub_private=checkpoint.hub_private,
        hub_timeout_s=checkpoint.hub_timeout_s,
        resume=resume,
    )
