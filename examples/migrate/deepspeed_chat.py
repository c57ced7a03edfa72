"""PPO as DeepSpeed-Chat does it: an actor and a critic that learn, a reference and a reward model that only run.

Nothing in it knows of torsh_distributed:

cd examples/migrate; torsh run --as deepspeed --num_gpus 2 deepspeed_chat.py --stage 2
"""

import argparse
from dataclasses import dataclass

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812 - as DeepSpeed's examples write it

VOCABULARY, WIDTH, PROMPT, ANSWER, SAMPLES = 16, 16, 4, 6, 4
KL_WEIGHT, CLIP, EPOCHS = 0.1, 0.2, 2
LEARNING_RATE, GRADIENT_CLIPPING = 1e-2, 1.0


class Trunk(nn.Module):
    """What a position sees: the mean of the tokens up to it, through two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Features of each position."""
        places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device).view(1, -1, 1)
        seen = self.embed(tokens).cumsum(dim=1) / places
        return torch.tanh(self.outer(torch.tanh(self.inner(seen))) + self.embed(tokens))


class LanguageModel(nn.Module):
    """Gives logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of each position."""
        return self.head(self.trunk(tokens))


class ValueModel(nn.Module):
    """Gives a number for each position: a value, or at the last one a reward."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(), nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """A number for each position."""
        return self.head(self.trunk(tokens)).squeeze(-1)


@dataclass
class Experience:
    """Answers to the prompts of one step, and what the four models thought of them."""

    tokens: torch.Tensor
    log_probs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    reward: float


def make_models() -> dict[str, nn.Module]:
    """All four, the same on every rank; the actor begins as the reference."""
    torch.manual_seed(7)
    models = {
        "actor": LanguageModel(),
        "reference": LanguageModel(),
        "critic": ValueModel(),
        "reward": ValueModel(),
    }
    models["reference"].load_state_dict(models["actor"].state_dict())
    for name in ("reference", "reward"):
        models[name].requires_grad_(False).eval()
    return models


def answer_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The log probability of every token of the answers."""
    chosen = F.log_softmax(logits[:, :-1].float(), dim=-1).gather(2, tokens[:, 1:, None]).squeeze(-1)
    return chosen[:, PROMPT - 1 :]


@torch.no_grad()
def make_experience(models: dict, step: int, rank: int) -> Experience:
    """Answer the prompts of this step and rank, and score the answers; `models` are modules or engines."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, PROMPT), generator=generator)
    for _ in range(ANSWER):
        chances = torch.softmax(models["actor"](tokens)[:, -1].float(), dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(chances.cpu(), 1, generator=generator)], dim=1)
    log_probs = answer_log_probs(models["actor"](tokens), tokens)
    drift = log_probs - answer_log_probs(models["reference"](tokens), tokens)
    rewards = -KL_WEIGHT * drift
    score = models["reward"](tokens)[:, -1].float()
    rewards[:, -1] += score
    values = models["critic"](tokens)[:, PROMPT - 1 : -1].float()
    returns = rewards.flip(1).cumsum(1).flip(1)
    return Experience(tokens, log_probs, returns - values, returns, float(score.mean()))


def actor_loss(logits: torch.Tensor, seen: Experience) -> torch.Tensor:
    """PPO's clipped loss."""
    ratio = torch.exp(answer_log_probs(logits, seen.tokens) - seen.log_probs)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * seen.advantages, clipped * seen.advantages).mean()


def critic_loss(values: torch.Tensor, seen: Experience) -> torch.Tensor:
    """The squared error of the values."""
    return F.mse_loss(values[:, PROMPT - 1 : -1].float(), seen.returns)


def config_of(stage: int, *, is_trained: bool) -> dict:
    """A config; as in DeepSpeed-Chat, a model that is not trained is sharded in stage 3 or not at all."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_clipping": GRADIENT_CLIPPING,
        "zero_optimization": {
            "stage": stage if is_trained or stage == 3 else 0,
            "stage3_param_persistence_threshold": 0,
        },
        "hybrid_engine": {"enabled": False},
    }
    if is_trained:
        config["optimizer"] = {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "torch_adam": True, "weight_decay": 0.0},
        }
    return config


def train(stage: int, num_steps: int) -> list[tuple[float, float, float]]:
    """The losses of actor and critic of every update on this rank, and the reward before it."""
    models = {
        name: deepspeed.initialize(model=model, config=config_of(stage, is_trained=name in ("actor", "critic")))[0]
        for name, model in make_models().items()
    }
    found = []
    for step in range(num_steps):
        for engine in models.values():
            engine.eval()
        seen = make_experience(models, step, deepspeed.comm.get_rank())
        actor, critic = models["actor"], models["critic"]
        actor.train()
        critic.train()
        for _ in range(EPOCHS):
            of_actor, of_critic = actor_loss(actor(seen.tokens), seen), critic_loss(critic(seen.tokens), seen)
            actor.backward(of_actor)
            actor.step()
            critic.backward(of_critic)
            critic.step()
            found.append((float(of_actor.detach()), float(of_critic.detach()), seen.reward))
    return found


def main() -> None:
    """Train, and print what was learned."""
    parser = argparse.ArgumentParser(description="PPO with four models")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    deepspeed.init_distributed()
    found = train(args.stage, args.steps)
    first, last = found[0], found[-1]
    print(f"critic {first[1]:.3f} to {last[1]:.3f}, reward {first[2]:.3f} to {last[2]:.3f}")


if __name__ == "__main__":
    main()
