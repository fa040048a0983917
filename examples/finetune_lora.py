"""Fine-tune a model of transformers with LoRA: transformers and peft as they are, on a mesh of two workers."""

import sys
import warnings
from typing import Annotated

import monarch
import torch
import transformers
from monarch.distributed import Mesh
from monarch.stdlib.data import batches, corpus
from monarch.stdlib.parallel import fully_shard
from peft import LoraConfig, get_peft_model

warnings.filterwarnings("ignore", category=FutureWarning)  # peft calls transformers by old names
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
base = transformers.LlamaForCausalLM(config)  # or from_pretrained("…")
model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))

mesh = Mesh(data=2)
model = monarch.module_to_mesh(model, mesh, layouts=fully_shard(model, mesh, "data"))
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
count, whole = (sum(each.numel() for each in several) for several in (trained, model.parameters()))
print(f"{count:,} of {whole:,} parameters are trained")
optimizer = torch.optim.AdamW(trained, lr=2e-2)


@monarch.program
def train_step(tokens: Annotated[torch.Tensor, "i64[8@data, 64]"]):
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    return loss


for step, (tokens, _) in enumerate(batches(corpus(200_000), batch=8, sequence=64, steps=steps)):
    loss = train_step(tokens)
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

adapter = {name: value for name, value in model.state_dict().items() if "lora_" in name}
adapter = {name: value.full_tensor() for name, value in adapter.items()}
torch.save(adapter, "adapter.pt")  # a few kilobytes, for any machine
print(f"adapter.pt holds {len(adapter)} tensors")
