r"""The heat equation by MGRIT, multigrid in time, for those who come from XBraid. A script to read, to copy and to change.

    python notebooks/examples/heat_mgrit.py --steps 1024 --points 127 --out heat_mgrit.png

solves the problem of XBraid's ``examples/ex-02``,

    u_t = u_xx + sin(x) (cos(t) - sin(t)),    u = 0 at x = 0 and x = pi,    exact: u = sin(x) cos(t),

by backward Euler, for all times at once. The states begin as random numbers, as in ex-02, and each cycle corrects them by fewer
and longer steps on two coarser levels. The script prints the residual norm of every cycle and its factor, as XBraid's print
level 1 does, with F-relaxation, with FCF-relaxation, and with half the points in space on each coarser level.

What XBraid calls the application is one function here, ``step``, from a state to the next one. It sees the time at which the step
starts, the length of the step and, by the shape of the state, the grid in space. docs/from_xbraid.md has a table of all options.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import lp_jax

jax.config.update("jax_enable_x64", True)


def grid(points):
    """Return the points inside (0, pi) and their distance; the boundary values are zero and not stored."""
    h = np.pi / (points + 1)
    return h * jnp.arange(1, points + 1), h


def step(u, layer):
    """Make one step of backward Euler, (1 - dt d²/dx²) u_next = u + dt f(t_next), and return the state twice.

    Coarse levels make it 4 and 16 times as long, so a step of your own must be stable then, too. A solve collects what is
    returned second on the finest level. With these states XBraid would call its access function.
    """
    x, h = grid(len(u))
    t = layer.t + layer.dt
    right = u + layer.dt * jnp.sin(x) * (jnp.cos(t) - jnp.sin(t))
    outer = jnp.full_like(u, -layer.dt / h**2)
    u = jax.lax.linalg.tridiagonal_solve(
        outer.at[0].set(0), 1 - 2 * outer, outer.at[-1].set(0), right[:, None]
    )
    return u[:, 0], u[:, 0]


def restrict(u):
    """Full weighting: every second point, from the first one inside to the last but one."""
    return (u[:-2:2] + 2 * u[1:-1:2] + u[2::2]) / 4


def prolong(v):
    """Linear interpolation, with zeros on the boundary."""
    known = jnp.pad(v, 1)
    between = (known[:-1] + known[1:]) / 2
    return jnp.stack([between, known[1:]], axis=1).ravel()[:-1]


def main(arguments=None):
    parser = argparse.ArgumentParser(description="The heat equation by MGRIT.")
    parser.add_argument("--steps", type=int, default=1024, help="of backward Euler, up to t = 2 pi")
    parser.add_argument("--points", type=int, default=127, help="in space: 2^k - 1")
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--coarsening", type=int, default=4)
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--out", default="heat_mgrit.png", help="file of the picture")
    args = parser.parse_args(arguments)

    x, _ = grid(args.points)
    times = jnp.linspace(0, 2 * np.pi, args.steps + 1)  # any times that increase
    problem = lp_jax.Problem(step, None, jnp.sin(x), t1=times, steps=args.steps, has_aux=True)
    settings = {
        "levels": args.levels,
        "coarsening": args.coarsening,
        "iterations": args.cycles,
        "coarse_step": lp_jax.Rediscretize(),  # the same step with the length of the interval
    }
    solvers = {
        "F": lp_jax.MGRIT(relaxation="F", **settings),
        "FCF": lp_jax.MGRIT(relaxation="FCF", **settings),
        "FCF, coarser in space": lp_jax.MGRIT(
            relaxation="FCF", spatial=(restrict, prolong), **settings
        ),
    }
    intervals = -(-args.steps // args.coarsening)
    guess = jax.random.uniform(jax.random.key(0), (intervals, args.points))

    serial = problem.solve(solver=lp_jax.Serial())
    error = jnp.abs(serial.aux - jnp.sin(x) * jnp.cos(times[1:, None])).max()  # of this equation
    print(f"one step after another: differs from the exact solution by at most {error:.1e}")
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, solver in solvers.items():
        solution = problem.solve(solver=solver, guess=guess).raise_if_failed()
        norms = np.asarray(solution.stats.residual_norms)
        print(f"\n{name}\ncycle  residual norm  factor")
        for cycle, norm in enumerate(norms):
            factor = f"{norm / norms[cycle - 1]:6.3f}" if cycle else ""
            print(f"{cycle:5}  {norm:13.2e}  {factor}".rstrip())
        difference = jnp.abs(solution.aux - serial.aux).max()
        print(f"differs from one step after another by at most {difference:.1e}")
        left.semilogy(norms, marker="o", label=name)

    left.set(xlabel="cycle", ylabel="residual norm before the cycle")
    left.set_title(f"{args.steps} steps, {args.levels} levels")
    left.grid(alpha=0.3)
    left.legend()
    states = jnp.concatenate([problem.y0[None], solution.aux])
    image = right.pcolormesh(x, times, states, cmap="RdBu_r", vmin=-1, vmax=1, rasterized=True)
    fig.colorbar(image).set_label("u", rotation=0)
    right.set(title="Every state of the last solve", xlabel="x", ylabel="t")
    fig.savefig(args.out, dpi=120)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
