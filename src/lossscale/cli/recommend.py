"""x"""
import click
@click.command()
def recommend() -> None:
    """X."""
