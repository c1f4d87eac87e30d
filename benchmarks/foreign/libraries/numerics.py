"""Gaussian processes, probabilistic programs, differential equations, privacy, attribution."""

from __future__ import annotations

from typing import Any

from foreign.libraries.adaptation import steps_of
from foreign.programs import program


def _curve(device: str) -> Any:
    import torch

    x = torch.linspace(0, 1, 24)
    return x.to(device), torch.sin(6 * x).to(device)


@program("gpytorch/exact", "gpytorch")
def exact(device: str) -> Any:
    import gpytorch
    import torch

    x, y = _curve(device)

    class Model(gpytorch.models.ExactGP):
        def __init__(self, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(device)
    model = Model(likelihood).to(device)
    model.train()
    likelihood.train()
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    found = steps_of(model, lambda: -marginal(model(x), y), lr=0.1)
    model.eval()
    likelihood.eval()
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        out = likelihood(model(x[:5]))
        lower, upper = out.confidence_region()
    return [*found, (upper - lower).mean().item()]


@program("gpytorch/variational", "gpytorch")
def variational(device: str) -> Any:
    import gpytorch

    x, y = _curve(device)

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            posterior = gpytorch.variational.CholeskyVariationalDistribution(6)
            super().__init__(
                gpytorch.variational.VariationalStrategy(self, x[:6].cpu()[:, None], posterior)
            )
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(2.5))

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(device)
    model = Model().to(device)
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=24)
    return steps_of(model, lambda: -bound(model(x[:, None]), y), lr=0.05)


@program("botorch/fit-and-acquire", "botorch.models", "botorch.fit", "botorch.optim")
def botorch(device: str) -> Any:
    import torch
    from botorch.acquisition import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.optim import optimize_acqf
    from gpytorch.mlls import ExactMarginalLogLikelihood

    x = torch.rand(8, 2, dtype=torch.double).to(device)
    y = 1 - (x - 0.5).norm(dim=-1, keepdim=True)
    model = SingleTaskGP(x, y).to(device)
    fit_gpytorch_mll(
        ExactMarginalLogLikelihood(model.likelihood, model),
        optimizer_kwargs={"options": {"maxiter": 5}},
    )
    bounds = torch.tensor([[0.0, 0], [1, 1]], dtype=torch.double).to(device)
    _, value = optimize_acqf(
        LogExpectedImprovement(model, best_f=y.max()),
        bounds=bounds,
        q=1,
        num_restarts=2,
        raw_samples=8,
        options={"maxiter": 3, "seed": 0},
    )
    return [value.item()]


@program("pyro/svi-vae", "pyro", "pyro.infer", "pyro.optim")
def svi(device: str) -> Any:
    import pyro
    import pyro.distributions as dist
    import torch
    from pyro.infer import SVI, Trace_ELBO
    from pyro.optim import Adam

    pyro.clear_param_store()
    encoder = torch.nn.Linear(16, 8).to(device)
    decoder = torch.nn.Linear(4, 16).to(device)
    data = (torch.rand(6, 16) > 0.5).float().to(device)

    def model(x: Any) -> None:
        pyro.module("decoder", decoder)
        with pyro.plate("data", x.shape[0]):
            zeros = x.new_zeros(x.shape[0], 4)
            z = pyro.sample("z", dist.Normal(zeros, zeros + 1).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=decoder(z)).to_event(1), obs=x)

    def guide(x: Any) -> None:
        pyro.module("encoder", encoder)
        with pyro.plate("data", x.shape[0]):
            out = encoder(x)
            pyro.sample("z", dist.Normal(out[:, :4], out[:, 4:].exp()).to_event(1))

    trial = SVI(model, guide, Adam({"lr": 1e-2}), loss=Trace_ELBO())
    return [trial.step(data) for _ in range(3)]


@program("pyro/hamiltonian", "pyro", "pyro.infer")
def hamiltonian(device: str) -> Any:
    import pyro
    import pyro.distributions as dist
    import torch
    from pyro.infer import MCMC, NUTS

    data = (torch.arange(10) * 0.1).to(device)

    def model(x: Any) -> None:
        mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), x.new_ones(())))
        with pyro.plate("data", 10):
            pyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    chain = MCMC(NUTS(model), num_samples=3, warmup_steps=2, disable_progbar=True)
    chain.run(data)
    return [float(chain.get_samples()["mean"].numel())]


@program("torchdiffeq/adjoint", "torchdiffeq")
def adjoint(device: str) -> Any:
    import torch
    from torchdiffeq import odeint_adjoint

    class Field(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
            )

        def forward(self, t: Any, y: Any) -> Any:
            return self.net(y**3)

    field = Field().to(device)
    start = torch.tensor([[2.0, 0.0]]).to(device)
    times = torch.linspace(0, 1, 5).to(device)

    def loss() -> Any:
        return odeint_adjoint(field, start, times, method="dopri5").abs().mean()

    return steps_of(field, loss)


@program("torchdiffeq/fixed-steps", "torchdiffeq")
def fixed_steps(device: str) -> Any:
    import torch
    from torchdiffeq import odeint

    field = torch.nn.Linear(2, 2).to(device)
    start = torch.ones(4, 2).to(device)
    times = torch.linspace(0, 1, 5).to(device)
    return steps_of(
        field, lambda: odeint(lambda t, y: field(y), start, times, method="rk4").square().mean()
    )


@program("torchsde/latent", "torchsde")
def sde(device: str) -> Any:
    import torch
    import torchsde

    class Field(torch.nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.mu, self.sigma = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def f(self, t: Any, y: Any) -> Any:
            return self.mu(y)

        def g(self, t: Any, y: Any) -> Any:
            return self.sigma(y).sigmoid()

    field = Field().to(device)
    start, times = torch.ones(4, 3).to(device), torch.linspace(0, 1, 4).to(device)
    return steps_of(
        field,
        lambda: torchsde.sdeint(field, start, times, dt=0.1, method="euler").square().mean(),
        steps=2,
    )


@program("opacus/private-sgd", "opacus")
def private(device: str) -> Any:
    import torch
    from opacus import PrivacyEngine

    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rows = torch.utils.data.TensorDataset(torch.randn(16, 1, 8, 8), torch.arange(16) % 2)
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(rows, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses[:1], float(engine.get_epsilon(1e-5) > 0)]


@program("captum/integrated-gradients", "captum.attr")
def attribution(device: str) -> Any:
    import torch
    from captum.attr import IntegratedGradients, LayerGradCam

    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(784, 3)
    ).to(device)
    images = torch.rand(2, 3, 16, 16).to(device)
    found, error = IntegratedGradients(model).attribute(
        images, target=torch.tensor([0, 1]).to(device), n_steps=5, return_convergence_delta=True
    )
    cam = LayerGradCam(model, model[0]).attribute(images, target=1)
    return [found.abs().sum().item(), error.abs().sum().item(), cam.abs().sum().item()]


@program("torch-optimizer/several", "torch_optimizer")
def optimizers(device: str) -> Any:
    import torch
    import torch_optimizer

    found = []
    for cls in (torch_optimizer.Lamb, torch_optimizer.AdaBelief, torch_optimizer.Lookahead):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4).to(device)
        if cls is torch_optimizer.Lookahead:
            optimizer = cls(torch.optim.SGD(model.parameters(), 0.1), k=2)
        else:
            optimizer = cls(model.parameters(), lr=1e-2)
        for _ in range(3):
            loss = model(torch.ones(2, 8).to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


@program("torch-ema/average", "torch_ema")
def averages(device: str) -> Any:
    import torch
    from torch_ema import ExponentialMovingAverage

    model = torch.nn.Linear(8, 4).to(device)
    average = ExponentialMovingAverage(model.parameters(), decay=0.9)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    data = torch.ones(2, 8).to(device)
    losses = []
    for _ in range(3):
        loss = model(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update()
        losses.append(loss.item())
    with average.average_parameters():
        return [*losses, model(data).square().mean().item()]
