"""The errors of products in float8 beside torchao's recipes: python docs/float8_errors.py, with torchao installed.

Of y = x @ w^T and of its gradients, relative to the product of the same values in bfloat16, as norms.
"""

import copy
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import yafsdp_fn as ya

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def derivatives(product: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, along: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = product(x)
    return [y.detach(), *torch.autograd.grad(y, [x, weight], along)]


def main() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)
    nn.init.normal_(linear.weight, std=0.02)
    x, along = torch.randn(64, 256, dtype=torch.bfloat16), torch.randn(64, 512, dtype=torch.bfloat16)
    exact = derivatives(linear, x, linear.weight, along)
    weight = ya.formats.Float8(linear.weight)
    rows = {"ya.formats.float8": derivatives(lambda x: ya.linear(x, weight), x, linear.weight, along)}
    for recipe in RECIPES:
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)  # as on a GPU, slowly
        module = convert_to_float8_training(nn.Sequential(copy.deepcopy(linear)), config=config)
        rows[f"torchao, {recipe}"] = derivatives(module, x, module[0].weight, along)
    print("| | y | dx | dw |\n|---|---:|---:|---:|")
    for name, found in rows.items():
        parts = [float((one - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]
        print(f"| {name} | {' | '.join(f'{part:.2%}' for part in parts)} |")


if __name__ == "__main__":
    main()
